//! Vector kernels against the portable ones, and both against candle's reading of the same blocks.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use proptest::prelude::*;

use super::activations::{Activations, block_len, words};
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

fn multiply(weights: Weights<'_>, input: &[f32], output: &mut [f32]) {
    let mut room = vec![0; room(input.len() / weights.columns, weights.columns, &[weights.format])];
    weights.multiply(input, output, &mut room);
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

    /// Whole numbers are exact in both, and floats are rounded in the same places: equal to the last bit.
    #[test]
    fn the_vector_product_is_the_portable_one(seed: u64, which in 0usize..6, m in 1usize..80, rows in 1usize..40) {
        let (format, _) = ALL[which];
        let bytes = blocks(format, rows, 768, seed);
        let weights = Weights::new(format, rows, 768, &bytes).unwrap();
        let input = values(m * 768, seed);
        let mut room = vec![0; words(m, 768, block_len(format))];
        let (x, _) = Activations::new(&input, 768, block_len(format), &mut room);
        let mut vector = vec![0.0; m * rows];
        multiply(weights, &input, &mut vector);
        for (at, got) in vector.iter().enumerate() {
            let expected = portable::dot_quantized(format, weights.row(at % rows), &x, at / rows);
            prop_assert_eq!(got.to_bits(), expected.to_bits(), "{:?}: {} {}", format, got, expected);
        }
    }

    /// Whichever instructions make the products of bytes: the best ones hide the others from the test above.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_way_to_multiply_bytes_gives_the_same(seed: u64, which in 0usize..6, m in 2usize..70) {
        use super::avx2::{dots::Dots, tile};
        if *ISA != Isa::Avx2 {
            return Ok(());
        }
        let (format, _) = ALL[which];
        let bytes = blocks(format, 8, 512, seed);
        let row_bytes = format.row_bytes(512).unwrap();
        let weights = Weights::new(format, 8, 512, &bytes).unwrap();
        let input = values(m * 512, seed);
        let mut room = vec![0; words(m, 512, block_len(format))];
        let (x, _) = Activations::new(&input, 512, block_len(format), &mut room);
        for dots in Dots::all() {
            let mut sums = [[0.0f32; 8]; 128];
            // SAFETY: the processor was asked for AVX2, and `Dots::all` gives only what it has.
            unsafe { tile::multiply(format, &tile::Rows::new(&bytes, row_bytes), (&x, dots), 0..m, &mut sums) };
            for (token, sums) in sums.iter().take(m).enumerate() {
                for (row, got) in sums.iter().enumerate() {
                    let expected = portable::dot_quantized(format, weights.row(row), &x, token);
                    prop_assert_eq!(got.to_bits(), expected.to_bits(), "{:?} {:?}: {} {}", format, dots, got, expected);
                }
            }
        }
    }

    /// The widest vectors add in the same order as narrower ones.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn wide_panels_are_narrow_ones(rows in 1usize..30, inner in 1usize..40, sixteens in 1usize..5) {
        if !avx512::able() {
            return Ok(());
        }
        let width = 16 * sixteens;
        let (left, right) = (values(rows * inner, 3), values(inner * width, 5));
        let left = Left { values: &left, rows, width: inner - inner / 3, stride: inner };
        let right = &right[..left.width * width];
        let (mut wide, mut narrow) = (values(rows * width, 7), values(rows * width, 7));
        // SAFETY: the processor was asked for AVX-512, and has AVX2 with it.
        unsafe {
            avx512::panel::panel(left, right, width, &mut wide);
            avx2::math::panel(left, right, width, &mut narrow);
        }
        prop_assert_eq!(wide, narrow);
    }

    /// What one token gets does not depend on who is read beside it.
    #[test]
    fn a_row_is_the_same_alone_and_among_others(seed: u64, which in 0usize..8) {
        let format = ALL.get(which).map_or(if which == 6 { Format::F32 } else { Format::F16 }, |(format, _)| *format);
        let bytes = match format.is_quantized() {
            true => blocks(format, 70, 256, seed),
            false => values(70 * 256, seed).into_iter().flat_map(|v| match format {
                Format::F32 => v.to_le_bytes().to_vec(),
                _ => f16::from_f32(v).to_le_bytes().to_vec(),
            }).collect(),
        };
        let weights = Weights::new(format, 70, 256, &bytes).unwrap();
        let input = values(67 * 256, seed);
        let mut many = vec![0.0; 67 * 70];
        multiply(weights, &input, &mut many);
        for (row, expected) in many.chunks_exact(70).enumerate() {
            let mut alone = vec![0.0; 70];
            multiply(weights, &input[row * 256..(row + 1) * 256], &mut alone);
            prop_assert_eq!(&alone, expected);
        }
    }

    #[test]
    fn integer_and_float_products_agree_to_the_rounding_of_inputs(seed: u64, which in 0usize..6) {
        let (format, _) = ALL[which];
        let bytes = blocks(format, 70, 256, seed);
        let weights = Weights::new(format, 70, 256, &bytes).unwrap();
        let input = values(6 * 256, seed);
        let mut out = vec![0.0; 6 * 70];
        multiply(weights, &input, &mut out);
        let mut wide = vec![0.0; 256];
        for (at, got) in out.iter().enumerate() {
            weights.dequantize_row(at % 70, &mut wide);
            let x = &input[at / 70 * 256..][..256];
            let exact: f64 = x.iter().zip(&wide).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            // Each input is off by half of 1/127 of its block's largest, with a random sign: far below the sum of all.
            let bound = wide.iter().map(|w| f64::from(w.abs())).sum::<f64>() * 3.0 / 254.0 * 0.5 + 1e-4;
            prop_assert!((f64::from(*got) - exact).abs() < bound, "{format:?}: {got} against {exact}");
        }
    }

    #[test]
    fn inputs_are_rounded_alike(values in prop::collection::vec(-1e3f32..1e3, RUN)) {
        let values: &[f32; RUN] = values.as_slice().try_into().unwrap();
        let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let mut room = [0; 10];
        let (x, _) = Activations::new(values, RUN, RUN, &mut room);
        let mut bytes = [0; RUN];
        let sums = activations::round_portable(values, 127.0 / largest.max(f32::MIN_POSITIVE), &mut bytes);
        prop_assert_eq!(bytemuck::cast_ref::<_, [i8; RUN]>(&x.quants()[0]), &bytes);
        prop_assert_eq!((x.sums()[0], x.scales()[0]), (sums, largest / 127.0));
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
                multiply(weights, &input, &mut out);
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
        let plain: f32 = a.iter().zip(&b).map(|(x, y)| x * y).sum();
        prop_assert!((dot(&a, &b) - plain).abs() < 1e-3);
        let (mut vector, mut portable) = (a.clone(), a.clone());
        silu_mul(&mut vector, &b);
        portable::silu_mul(&mut portable, &b);
        for (x, y) in vector.iter().zip(&portable) {
            prop_assert!((x - y).abs() < 1e-5);
        }
        let top = largest_of(&a, -1.0);
        prop_assert_eq!(top, a.iter().fold(-1.0f32, |m, v| m.max(*v)));
        let (mut vector, mut portable) = (a.clone(), a);
        // Far below the largest nothing is left, as of a masked score.
        if let Some(last) = vector.last_mut() {
            *last = f32::NEG_INFINITY;
            portable[vector.len() - 1] = f32::NEG_INFINITY;
        }
        let sums = (exp_sum(&mut vector, top * scale.abs()), portable::exp_sum(&mut portable, top * scale.abs()));
        prop_assert!((sums.0 - sums.1).abs() <= 1e-5 * sums.1.abs());
        for (x, y) in vector.iter().zip(&portable) {
            prop_assert!((x - y).abs() <= 1e-6 * y.abs(), "{x} {y}");
        }
    }

    #[test]
    fn panels_and_transposes_of_any_shape(rows in 1usize..10, inner in 1usize..40, width in 1usize..40, more in 0usize..9) {
        let (left, right) = (values(rows * inner, 3), values(inner * width, 5));
        let mut vector = values(rows * width, 7);
        let mut plain = vector.clone();
        let left = Left { values: &left, rows, width: inner - inner / 3, stride: inner };
        let right = &right[..left.width * width];
        panel(left, right, width, &mut vector);
        portable::panel(left, right, width, &mut plain);
        for (x, y) in vector.iter().zip(&plain) {
            prop_assert!((x - y).abs() < 1e-3, "{x} {y}");
        }
        let stride = width + more;
        let halves: Vec<f16> = values(inner * stride, 9).into_iter().map(f16::from_f32).collect();
        let floats = values(inner * stride, 11);
        for numbers in [Numbers::F16(&halves), Numbers::F32(&floats)] {
            let (mut vector, mut plain) = (vec![7.0; width * (inner + more)], vec![7.0; width * (inner + more)]);
            transpose(numbers, stride, width, inner, inner + more, &mut vector);
            portable::transpose(numbers, stride, width, inner, inner + more, &mut plain);
            prop_assert_eq!(vector, plain);
            let (mut together, mut apart) = (vec![7.0; width * inner], vec![7.0; width * inner]);
            widen(numbers, stride, width, inner, &mut together);
            for (token, out) in apart.chunks_exact_mut(width).enumerate() {
                numbers.slice(token * stride..token * stride + width).widen(out);
            }
            prop_assert_eq!(together, apart);
        }
    }
}

/// Each width divides the inputs, so that only the comparison of widths can tell.
#[test]
#[should_panic(expected = "matrices of different widths")]
fn matrices_of_different_widths_are_refused() {
    let (wide, narrow) = (blocks(Format::Q4K, 8, 512, 1), blocks(Format::Q4K, 8, 256, 2));
    let product =
        |columns, bytes, output| Product { weights: Weights::new(Format::Q4K, 8, columns, bytes).unwrap(), output };
    let (mut one, mut two) = (vec![0.0; 8], vec![0.0; 16]);
    let mut products = [product(512, &wide, &mut one[..]), product(256, &narrow, &mut two[..])];
    let _never = multiply_all(&values(512, 3), &mut products, &mut [0; 512], None);
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
        multiply(weights, &x, &mut out);
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

#[test]
fn a_product_that_is_not_wanted_any_more_is_given_up() {
    use molt_kv::decoder::StopFlag;
    let check = |tokens: usize| {
        let (stop, bytes) = (StopFlag::new(), blocks(Format::Q8_0, 64, 256, 5));
        let weights = Weights::new(Format::Q8_0, 64, 256, &bytes).unwrap();
        let input = values(tokens * 256, 3);
        let mut room = vec![0; room(tokens, 256, &[Format::Q8_0])];
        let mut output = vec![0.0; tokens * 64];
        let mut run = |stop: &StopFlag| {
            multiply_all(&input, &mut [Product { weights, output: &mut output }], &mut room, Some(stop))
        };
        assert!(run(&stop).is_ok());
        stop.raise();
        assert!(run(&stop).is_err());
        stop.lower();
        assert!(run(&stop).is_ok());
    };
    check(1);
    check(40);
}
