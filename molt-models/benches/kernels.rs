//! Speed of the matrix kernels, in weights multiplied per second: from the cache on one thread (what the instructions allow)
//! and from memory on all threads (what decoding sees). `cargo bench --workspace --bench kernels`.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use molt_models::kernels::{Format, Weights, room};

const FORMATS: [Format; 8] =
    [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q8_0, Format::Q4K, Format::Q6K, Format::F16, Format::F32];
const COLUMNS: usize = 1536;

fn blocks(format: Format, rows: usize) -> Vec<u8> {
    let bytes = format.row_bytes(COLUMNS).map_or(0, |bytes| bytes * rows);
    // Floats must be ordinary numbers: those near zero, which weights are not, take the processor a hundred times as long.
    let top = |i: usize| !format.is_quantized() && i % format.block_bytes() == format.block_bytes() - 1;
    let byte = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()[0] & 0x3f;
    (0..bytes).map(|i| if top(i) { byte(i) & 3 | 0x38 } else { byte(i) }).collect()
}

fn products(c: &mut Criterion) {
    // What lies in the cache is used up faster than threads meet.
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    for (place, rows, threads) in [("cache", 256, 1), ("memory", 80_000, threads)] {
        let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(threads).build() else { continue };
        for format in FORMATS {
            let bytes = blocks(format, rows);
            let Some(weights) = Weights::new(format, rows, COLUMNS, &bytes) else { continue };
            let mut group = c.benchmark_group(format!("{place}/{format:?}"));
            let counts: &[usize] = if place == "cache" { &[1, 8, 256] } else { &[1, 256] };
            for tokens in counts {
                let input: Vec<f32> = (0..tokens * COLUMNS).map(|i| (i as f32 * 0.37).sin()).collect();
                let mut output = vec![0.0; tokens * rows];
                let mut room = vec![0; room(*tokens, COLUMNS, &[format])];
                let work = u64::try_from(rows * COLUMNS * tokens).unwrap_or(u64::MAX);
                group.throughput(Throughput::Elements(work));
                group.sample_size(10);
                group.bench_function(BenchmarkId::from_parameter(tokens), |b| {
                    // From inside of the pool, as the engine's thread calls.
                    pool.install(|| b.iter(|| weights.multiply(&input, &mut output, &mut room)));
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, products);
criterion_main!(benches);
