//! Caches on their way to the disk. The engine's thread writes them into files without names, which is as quick as memory;
//! waiting for the disk and giving them their names is done by a thread of its own.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, bounded};
use molt_scheduler::SequenceId;
use tempfile::NamedTempFile;

use crate::engine::Engine;
use crate::state::answers::Keeping;
use crate::state::{State, What, replace};

/// Records that may wait for the disk; whoever has more waits.
const WAITING: usize = 64;

/// A record on its way.
struct Written {
    state: Arc<State>,
    file: NamedTempFile,
    to: PathBuf,
    /// The answer's journal: a cache is of no use without.
    journal: Option<File>,
    gone: Arc<AtomicBool>,
    busy: Arc<AtomicBool>,
}

/// Writes caches. Dropped, it waits until all have arrived.
#[derive(Debug)]
pub struct Recorder {
    queue: Option<Sender<Written>>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's reason.
    pub fn start() -> std::io::Result<Self> {
        let (queue, taken) = bounded::<Written>(WAITING);
        let thread = std::thread::Builder::new().name("molt-state".to_owned()).spawn(move || {
            for Written { state, file, to, journal, gone, busy } in taken {
                if !gone.load(Ordering::Relaxed) {
                    // The journal first; its name reaches the disk with that of the record.
                    let synced = journal.map_or(Ok(()), |journal| journal.sync_data());
                    state.judge(What::Caches, &to, synced.and_then(|()| replace::put_in_place(file, &to)));
                }
                // It may have ended meanwhile.
                if gone.load(Ordering::Relaxed) {
                    let _not_there = std::fs::remove_file(&to);
                }
                busy.store(false, Ordering::Relaxed);
            }
        })?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    /// Writes the caches of an answer, if enough has been read since that was last done, or if it must be.
    pub fn record(&self, engine: &mut Engine, id: SequenceId, keeping: &mut Keeping, must: bool) {
        let (read, state) = (engine.read_of(id), keeping.state().clone());
        let due = must || read.saturating_sub(keeping.recorded) >= state.settings().every_tokens.max(1);
        // While one is under way another would only wait behind it, unless it is the last.
        if !due || !keeping.is_kept() || (!must && keeping.busy.load(Ordering::Relaxed)) {
            return;
        }
        keeping.recorded = read;
        let folder = state.answers_folder();
        let Some(written) = state.judge(What::Caches, &folder, engine.write_records(id, &keeping.records, &folder))
        else {
            return;
        };
        for (source, next, file) in written {
            let to = state.record_path(keeping.id(), &source);
            let (gone, busy, state) = (keeping.gone.clone(), keeping.busy.clone(), state.clone());
            let journal = keeping.journal_file();
            busy.store(true, Ordering::Relaxed);
            if let Some(queue) = &self.queue {
                // A thread that is no more writes nothing more; what the journal has is enough to go on with.
                let _lost = queue.send(Written { state, file, to, journal, gone, busy });
            }
            keeping.records.insert(source, next);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so.
            let _panicked = thread.join();
        }
    }
}
