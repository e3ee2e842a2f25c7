//! Vector kernels against the portable ones, and both against candle's reading of the same blocks.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use proptest::prelude::*;

use super::*;

const ALL: [(Format, GgmlDType); 6] = [
    (Format::Q4_0, GgmlDType::Q4_0),
    (Format::Q4_1, GgmlDType::Q4_1),
    (Format::Q5_0, GgmlDType::Q5_0),
    (Format::Q8_0, GgmlDType::Q8_0),
    (Format::Q4K, GgmlDType::Q4K),
    (Format::Q6K, GgmlDType::Q6K),
];

/// Blocks of random bytes whose scales are ordinary numbers.
fn blocks(format: Format, rows: usize, columns: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2) + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56).to_le_bytes()[0]
    };
    let mut bytes: Vec<u8> = (0..format.row_bytes(columns).unwrap() * rows).map(|_| next()).collect();
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        let scales: &[usize] = match format {
            Format::Q4_1 | Format::Q4K => &[0, 2],
            Format::Q6K => &[208],
            _ => &[0],
        };
        for at in scales {
            let value = f16::from_f32(f32::from(next()) / 2_000.0 + 0.001);
            block[*at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

fn values(count: usize, seed: u64) -> Vec<f32> {
    (0..count).map(|i| ((i as f32 + 1.0) * (seed % 97 + 3) as f32 * 0.37).sin() * 3.0).collect()
}

/// The largest difference, as a share of the norms of what was multiplied.
fn difference(a: &[f32], b: &[f32], scale: f32) -> f32 {
    a.iter().zip(b).fold(0.0f32, |m, (x, y)| m.max((x - y).abs())) / scale
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn rows_are_what_candle_reads(seed: u64, which in 0usize..6) {
        let (format, dtype) = ALL[which];
        let bytes = blocks(format, 3, 512, seed);
        let storage = QStorage::from_data(bytes.clone().into(), &Device::Cpu, dtype).unwrap();
        let expected: Vec<f32> =
            QTensor::new(storage, (3, 512)).unwrap().dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let weights = Weights::new(format, 3, 512, &bytes).unwrap();
        let (mut vector, mut portable) = (vec![0.0; 512], vec![0.0; 512]);
        for row in 0..3 {
            weights.dequantize_row(row, &mut vector);
            portable::dequantize(format, weights.row(row), &mut portable);
            let expected = &expected[row * 512..(row + 1) * 512];
            let largest = expected.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            prop_assert!(difference(&portable, expected, largest) < 1e-6, "{format:?}");
            prop_assert!(difference(&vector, expected, largest) < 1e-6, "{format:?}");
        }
    }

    #[test]
    fn the_vector_dot_product_is_the_portable_one(seed: u64, which in 0usize..6, m in 1usize..5) {
        let (format, _) = ALL[which];
        let bytes = blocks(format, 1, 768, seed);
        let input = values(m * 768, seed);
        let activations = Activations::new(&input, 768);
        let rows: Vec<_> = activations.rows().collect();
        let (mut vector, mut plain) = (vec![0.0; m], vec![0.0; m]);
        dot_quantized(format, &bytes, &rows, &mut vector);
        portable::dot_quantized(format, &bytes, &rows, &mut plain);
        // The integer part is exact in both; the tolerance is for the order in which 24 floats are added.
        let mut wide = vec![0.0; 768];
        portable::dequantize(format, &bytes, &mut wide);
        let scale = wide.iter().map(|w| w.abs()).sum::<f32>() * 3.0;
        prop_assert!(difference(&vector, &plain, scale) < 1e-6, "{format:?}: {vector:?} {plain:?}");
    }

    #[test]
    fn integer_and_float_products_agree_to_the_rounding_of_inputs(seed: u64, which in 0usize..6) {
        let (format, _) = ALL[which];
        let bytes = blocks(format, 70, 256, seed);
        let weights = Weights::new(format, 70, 256, &bytes).unwrap();
        let input = values(6 * 256, seed);
        let mut many = vec![0.0; 6 * 70];
        weights.multiply(&input, &mut many);
        for (row, expected) in many.chunks_exact(70).enumerate() {
            let mut few = vec![0.0; 70];
            weights.multiply(&input[row * 256..(row + 1) * 256], &mut few);
            let mut wide = vec![0.0; 256];
            for (o, (few, many)) in few.iter().zip(expected).enumerate() {
                weights.dequantize_row(o, &mut wide);
                // Each input is off by half of 1/127 of its run's largest, with a random sign: far below the sum of all.
                let bound = wide.iter().map(|w| w.abs()).sum::<f32>() * 3.0 / 254.0 * 0.5 + 1e-4;
                prop_assert!((few - many).abs() < bound, "{format:?}: {few} against {many}");
            }
        }
    }
}

#[test]
fn every_finite_half_is_widened_exactly() {
    for bits in 0..=u16::MAX {
        let half = f16::from_bits(bits);
        if half.is_finite() {
            assert_eq!(format::half_at(&bits.to_le_bytes(), 0).to_bits(), half.to_f32().to_bits(), "{bits:#x}");
        }
    }
}

#[test]
fn plain_floats_at_any_address() {
    // Multiples of 1/8 below 4: exact at every float format.
    let floats: Vec<f32> = (0..4 * 40).map(|i| ((i * 37 % 64) as f32 - 32.0) / 8.0).collect();
    for format in [Format::F32, Format::F16, Format::Bf16] {
        for offset in [0, 1] {
            let mut bytes = vec![0u8; offset];
            for f in &floats {
                match format {
                    Format::F32 => bytes.extend(f.to_le_bytes()),
                    Format::F16 => bytes.extend(f16::from_f32(*f).to_le_bytes()),
                    _ => bytes.extend(half::bf16::from_f32(*f).to_le_bytes()),
                }
            }
            let weights = Weights::new(format, 4, 40, &bytes[offset..]).unwrap();
            for m in [1, 3, 9] {
                let input = values(m * 40, 2);
                let mut out = vec![0.0; m * 4];
                weights.multiply(&input, &mut out);
                for (at, got) in out.iter().enumerate() {
                    let (x, w) = (&input[at / 4 * 40..][..40], &floats[at % 4 * 40..][..40]);
                    let expected: f32 = x.iter().zip(w).map(|(a, b)| a * b).sum();
                    assert!((got - expected).abs() < 1e-3, "{format:?}, {m} rows: {got} {expected}");
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn float_helpers_at_any_length(a in prop::collection::vec(-2.0f32..2.0, 0..100), scale in -2.0f32..2.0) {
        let b: Vec<f32> = a.iter().rev().copied().collect();
        let halves: Vec<f16> = a.iter().map(|v| f16::from_f32(*v)).collect();
        let plain: f32 = a.iter().zip(&b).map(|(x, y)| x * y).sum();
        let of_halves: f32 = halves.iter().zip(&b).map(|(x, y)| x.to_f32() * y).sum();
        prop_assert!((dot(&a, &b) - plain).abs() < 1e-3 && (dot_f16(&halves, &b) - of_halves).abs() < 1e-3);
        let (mut vector, mut portable) = (b.clone(), b.clone());
        add_scaled(&mut vector, &a, scale);
        portable::add_scaled(&mut portable, &a, scale);
        for (x, y) in vector.iter().zip(&portable) {
            prop_assert!((x - y).abs() < 1e-5);
        }
    }
}

#[test]
fn candle_multiplies_alike() {
    for (format, dtype) in ALL {
        let dense = Tensor::from_vec(values(64 * 512, 11), (64, 512), &Device::Cpu).unwrap();
        let q = QTensor::quantize(&dense, dtype).unwrap();
        let bytes = q.data().unwrap();
        let weights = Weights::new(format, 64, 512, &bytes).unwrap();
        let x = values(512, 4);
        let mut out = vec![0.0; 64];
        weights.multiply(&x, &mut out);
        let expected: Vec<f32> = q
            .dequantize(&Device::Cpu)
            .unwrap()
            .matmul(&Tensor::from_vec(x, (512, 1), &Device::Cpu).unwrap())
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1()
            .unwrap();
        // 512 products of up to 9, each input off by up to 0.4 %.
        assert!(difference(&out, &expected, 512.0) < 0.01, "{format:?}");
    }
}
