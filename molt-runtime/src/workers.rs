//! The threads that compute: a small fixed pool. Its threads sleep while there is nothing to do.

use std::num::NonZeroUsize;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// How many threads compute, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::Args)]
pub struct Workers {
    /// Threads that compute [default: as many as the system lets the process use].
    #[arg(long, global = true)]
    pub threads: Option<NonZeroUsize>,
    /// Keep each of them on one processor: good where nobody else wants the processors, bad where somebody does.
    #[arg(long = "pin", global = true)]
    pub pinned: bool,
}

impl Workers {
    /// Runs `work` on the first of the threads; the others help wherever it goes parallel. Whoever computes has to be
    /// one of them: a thread from outside would wait for another to wake at every product.
    pub fn run<T: Send>(self, work: impl FnOnce() -> T + Send) -> Result<T, ThreadPoolBuildError> {
        Ok(self.pool()?.install(work))
    }

    /// The threads.
    pub fn pool(self) -> Result<ThreadPool, ThreadPoolBuildError> {
        let allowed = processors();
        let threads = self.threads.map_or(allowed.len().max(1), NonZeroUsize::get);
        let mut builder =
            ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("molt-worker-{index}"));
        if self.pinned && threads <= allowed.len() {
            builder = builder.start_handler(move |index| {
                let mut one = CpuSet::new();
                // Where it is not allowed the thread runs anywhere, which is slower and not wrong.
                let _elsewhere =
                    allowed.get(index).map(|cpu| one.set(*cpu).and_then(|()| sched_setaffinity(THIS, &one)));
            });
        }
        builder.build()
    }
}

/// The calling thread.
const THIS: Pid = Pid::from_raw(0);

/// Processors that this process may run on.
fn processors() -> Vec<usize> {
    let set = sched_getaffinity(THIS).unwrap_or_default();
    (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_runs_on_as_many_threads_as_asked_for() {
        let check = |threads: usize, pinned| {
            let workers = Workers { threads: NonZeroUsize::new(threads), pinned };
            let (count, inside) =
                workers.run(|| (rayon::current_num_threads(), rayon::current_thread_index().is_some())).unwrap();
            assert_eq!(count, if threads == 0 { processors().len() } else { threads });
            assert!(inside, "the work itself is on one of them");
        };
        check(0, false);
        check(1, true);
        check(3, false);
        check(0, true);
    }

    #[test]
    fn pinned_threads_stay_where_they_are() {
        let workers = Workers { threads: NonZeroUsize::new(1), pinned: true };
        let alone = workers.run(|| processors().len()).unwrap();
        assert_eq!(alone, 1);
    }
}
