//! The limit of decoding: every token reads all weights once.

use std::time::Instant;

use rayon::prelude::*;

/// The speed at which memory gives what is read, the limit of decoding: measured beside the runs that are compared with it.
#[derive(Debug)]
pub struct Bandwidth {
    memory: Vec<[u64; LINE]>,
}

/// Words that are summed apart, so that additions do not wait for one another: a line of the cache.
const LINE: usize = 8;

impl Bandwidth {
    /// Takes half a GiB to read: many times what any cache holds.
    pub fn new() -> Self {
        Self { memory: vec![[1; LINE]; (1 << 29) / size_of::<[u64; LINE]>()] }
    }

    /// Bytes per second at which all threads of the pool together read memory: the best of reading it as one stretch a
    /// thread, and as up to sixteen that are far apart (as rows of a matrix are), each three times.
    pub fn measure(&self) -> f64 {
        let best = |streams| (0..3).map(|_| self.once(streams)).fold(0.0, f64::max);
        [1, 2, 4, 8, 16].map(best).into_iter().fold(0.0, f64::max)
    }

    fn once(&self, streams: usize) -> f64 {
        let share = self.memory.len() / rayon::current_num_threads().max(1);
        let start = Instant::now();
        let sums = self.memory.par_chunks(share).map(|part| {
            let length = part.len() / streams;
            let mut sums = [0u64; LINE];
            for line in 0..length {
                for stream in 0..streams {
                    for (sum, word) in sums.iter_mut().zip(&part[stream * length + line]) {
                        *sum ^= word;
                    }
                }
            }
            sums.iter().fold(0, |a, b| a ^ b)
        });
        std::hint::black_box(sums.reduce(|| 0, |a, b| a ^ b));
        size_of_val(&*self.memory) as f64 / start.elapsed().as_secs_f64()
    }
}

impl Default for Bandwidth {
    fn default() -> Self {
        Self::new()
    }
}
