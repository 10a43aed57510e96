//! The arithmetic. Each kernel is written once and compiled for each [`SimdLevel`]; all of them
//! give the same bits.

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Element, Lanes, Portable, SimdLevel};

/// Generates one function per level from a body, and one that selects the level. The body and the
/// functions that it calls are inlined, so that the compiler uses the level's instructions. The
/// compiler must not fuse or reorder operations.
macro_rules! compiled {
    ($(#[$doc:meta])* fn $name:ident $(<$e:ident>)? ($($arg:ident: $type:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "a kernel's")]
        pub(super) fn $name$(<$e: Element>)?(level: SimdLevel, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx2,fma")]
                #[allow(clippy::too_many_arguments, reason = "a kernel's")]
                fn avx512$(<$e: Element>)?($($arg: $type),*) {
                    $body::<Avx512 $(, $e)?>($($arg),*);
                }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments, reason = "a kernel's")]
                fn avx2$(<$e: Element>)?($($arg: $type),*) {
                    $body::<Avx2 $(, $e)?>($($arg),*);
                }
                match level {
                    // SAFETY: callers pass a level only if `SimdLevel::is_here` has found it.
                    SimdLevel::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: callers pass this level only if `SimdLevel::is_here` has found AVX2
                    // and FMA.
                    SimdLevel::Avx2 => return unsafe { avx2($($arg),*) },
                    SimdLevel::Portable => {}
                }
            }
            let _ = level;
            $body::<Portable $(, $e)?>($($arg),*);
        }
    };
}

/// A matrix in memory: rows of `cols` numbers, `stride` apart. The product of a row with a vector
/// is the sum, as a tree, of `parts` sums of equal length.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, E> {
    pub(super) numbers: &'a [E],
    pub(super) stride: usize,
    pub(super) cols: usize,
    pub(super) parts: usize,
}

/// Several vectors, or space for them, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    pub(super) numbers: &'a [f32],
    pub(super) stride: usize,
    pub(super) count: usize,
}

/// Numbers that several threads write concurrently, each to a separate part.
#[derive(Clone, Copy)]
pub(super) struct SharedOutput<'a> {
    begin: *mut f32,
    len: usize,
    life: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: any thread may write the numbers; callers of the unsafe methods ensure that no two
// threads use overlapping parts.
unsafe impl Send for SharedOutput<'_> {}
// SAFETY: threads that share it write disjoint parts, which callers of the unsafe methods ensure.
unsafe impl Sync for SharedOutput<'_> {}

impl<'a> SharedOutput<'a> {
    pub(super) fn new(numbers: &'a mut [f32]) -> SharedOutput<'a> {
        SharedOutput {
            begin: numbers.as_mut_ptr(),
            len: numbers.len(),
            life: std::marker::PhantomData,
        }
    }

    /// Returns the numbers from `from` on.
    pub(super) fn from(self, from: usize) -> SharedOutput<'a> {
        assert!(from <= self.len, "beyond the places");
        // SAFETY: the assertion ensures that the pointer stays within the numbers.
        let begin = unsafe { self.begin.add(from) };
        SharedOutput { begin, len: self.len - from, life: self.life }
    }

    /// Returns `len` of the numbers, from `from` on.
    ///
    /// # Safety
    /// No other part that overlaps this one may exist.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the caller upholds the safety clause")]
    pub(super) unsafe fn part(&self, from: usize, len: usize) -> &mut [f32] {
        assert!(from <= self.len && len <= self.len - from, "beyond the places");
        // SAFETY: the assertion ensures that the part is within the numbers, and the caller that it
        // is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.begin.add(from), len) }
    }
}

/// The number of vectors that stay in the cache while the matrix is read.
const TILE: usize = 64;

compiled! {
    /// Writes the product of row `o` of `matrix` with vector `r` to `out[r * out_stride + o]`, for
    /// `rows` of the matrix. No other thread may use these numbers.
    fn multiply<E>(
        matrix: Matrix<'_, E>,
        rows: std::ops::Range<usize>,
        vectors: Vectors<'_>,
        out: SharedOutput<'_>,
        out_stride: usize,
    ) = multiply_body
}

#[inline(always)]
fn multiply_body<L: Lanes, E: Element>(
    matrix: Matrix<'_, E>,
    rows: std::ops::Range<usize>,
    vectors: Vectors<'_>,
    out: SharedOutput<'_>,
    out_stride: usize,
) {
    for tile in (0..vectors.count).step_by(TILE) {
        let tile = tile..vectors.count.min(tile + TILE);
        let mut o = rows.start;
        while o < rows.end {
            let wide = o + 4 <= rows.end;
            let mut r = tile.start;
            while r < tile.end {
                match (wide, r + 4 <= tile.end) {
                    (true, true) => block::<L, E, 4, 4>(matrix, o, vectors, r, out, out_stride),
                    (true, false) => block::<L, E, 4, 1>(matrix, o, vectors, r, out, out_stride),
                    (false, true) => block::<L, E, 1, 4>(matrix, o, vectors, r, out, out_stride),
                    (false, false) => block::<L, E, 1, 1>(matrix, o, vectors, r, out, out_stride),
                }
                r += if r + 4 <= tile.end { 4 } else { 1 };
            }
            o += if wide { 4 } else { 1 };
        }
    }
}

/// Computes the products of `O` rows with `R` vectors.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "loops of a constant length, which are unrolled")]
fn block<L: Lanes, E: Element, const O: usize, const R: usize>(
    matrix: Matrix<'_, E>,
    o: usize,
    vectors: Vectors<'_>,
    r: usize,
    out: SharedOutput<'_>,
    out_stride: usize,
) {
    let width = matrix.cols / matrix.parts;
    let mut sums = [[[0.0; 8]; R]; O];
    for part in 0..matrix.parts {
        let mut weights = [&[][..]; O];
        for (i, row) in weights.iter_mut().enumerate() {
            *row = &matrix.numbers[(o + i) * matrix.stride + part * width..][..width];
        }
        let mut values = [&[][..]; R];
        for (i, vector) in values.iter_mut().enumerate() {
            *vector = &vectors.numbers[(r + i) * vectors.stride + part * width..][..width];
        }
        let lanes = products::<L, E, O, R>(weights, values, width);
        for i in 0..O {
            for j in 0..R {
                sums[i][j][part] = lanes[i][j].sum();
            }
        }
    }
    for j in 0..R {
        // SAFETY: the caller of `multiply` ensures that no other thread uses these numbers.
        let out = unsafe { out.part((r + j) * out_stride + o, O) };
        for i in 0..O {
            out[i] = tree(&mut sums[i][j][..matrix.parts]);
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "loops of a constant length, which are unrolled")]
fn products<L: Lanes, E: Element, const O: usize, const R: usize>(
    weights: [&[E]; O],
    values: [&[f32]; R],
    width: usize,
) -> [[L; R]; O] {
    let mut sums = [[L::zero(); R]; O];
    let whole = width / 16 * 16;
    let mut at = 0;
    while at < whole {
        let mut x = [L::zero(); R];
        for j in 0..R {
            // SAFETY: all slices are `width` long, and the loop keeps `at + 16 <= width`.
            x[j] = L::load(unsafe { &*values[j].as_ptr().add(at).cast() });
        }
        for i in 0..O {
            // SAFETY: the weights of a row are `width` long too.
            let w = E::lanes::<L>(unsafe { &*weights[i].as_ptr().add(at).cast() });
            for j in 0..R {
                sums[i][j] = sums[i][j].add_product(w, x[j]);
            }
        }
        at += 16;
    }
    if whole < width {
        for i in 0..O {
            let w = E::lanes::<L>(&padded(&weights[i][whole..], E::ZERO));
            for j in 0..R {
                sums[i][j] = sums[i][j].add_product(w, L::load(&padded(&values[j][whole..], 0.0)));
            }
        }
    }
    sums
}

#[inline(always)]
fn padded<T: Copy>(rest: &[T], zero: T) -> [T; 16] {
    let mut padded = [zero; 16];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

/// Adds neighbours until one sum is left; takes 1, 2, 4 or 8 sums.
#[inline(always)]
fn tree(sums: &mut [f32]) -> f32 {
    let mut count = sums.len();
    while count > 1 {
        count /= 2;
        for i in 0..count {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
    }
    sums[0]
}

compiled! {
    /// Scales `values` to a mean square of one, times `weight`.
    fn norm(values: &mut [f32], weight: &[f32], epsilon: f32) = norm_body
}

#[inline(always)]
fn norm_body<L: Lanes>(values: &mut [f32], weight: &[f32], epsilon: f32) {
    let [[squares]] = products::<L, f32, 1, 1>([values], [values], values.len());
    let scale = 1.0 / (squares.sum() / values.len() as f32 + epsilon).sqrt();
    for (value, weight) in values.iter_mut().zip(weight) {
        *value = *value * scale * weight;
    }
}

compiled! {
    /// Computes the input of the feed-forward part's last matrix: `gate = silu(gate) * up`.
    fn gate(gate: &mut [f32], up: &[f32]) = gate_body
}

#[inline(always)]
fn gate_body<L: Lanes>(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

compiled! {
    /// Turns scores into weights: the exponentials of `scale` times each score, divided by their
    /// sum.
    fn softmax(scores: &mut [f32], scale: f32) = softmax_body
}

#[inline(always)]
fn softmax_body<L: Lanes>(scores: &mut [f32], scale: f32) {
    let mut largest = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = scores.as_chunks_mut::<16>();
    for chunk in &*chunks {
        for (largest, score) in largest.iter_mut().zip(chunk) {
            *largest = if *score > *largest { *score } else { *largest };
        }
    }
    let largest = largest.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0.0; 16];
    for chunk in chunks {
        for (sum, score) in sums.iter_mut().zip(chunk) {
            *score = exp((*score - largest) * scale);
            *sum += *score;
        }
    }
    for (sum, score) in sums.iter_mut().zip(rest) {
        *score = exp((*score - largest) * scale);
        *sum += *score;
    }
    let part = 1.0 / L::load(&sums).sum();
    for score in scores {
        *score *= part;
    }
}

compiled! {
    /// Adds to `out` each of the vectors in `rows` times its weight, in their order.
    fn accumulate(out: &mut [f32], weights: &[f32], rows: &[f32]) = accumulate_body
}

#[inline(always)]
fn accumulate_body<L: Lanes>(out: &mut [f32], weights: &[f32], rows: &[f32]) {
    let dims = out.len();
    for (weight, row) in weights.iter().zip(rows.chunks_exact(dims)) {
        for (out, value) in out.iter_mut().zip(row) {
            *out = weight.mul_add(*value, *out);
        }
    }
}

/// Returns the exponential, correct to two units in the last place. Below -87 it returns the
/// smallest normal number.
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the constants have their usual digits")]
fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, which is then in the sum's
    // low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let whole = shifted - ROUND;
    let rest = whole.mul_add(-0.693_359_375, x);
    let rest = whole.mul_add(2.121_944_4e-4, rest);
    let mut power = 1.987_569_15e-4;
    for term in [1.398_199_95e-3, 8.333_451_9e-3, 4.166_579_6e-2, 1.666_666_55e-1, 0.5] {
        power = f32::mul_add(power, rest, term);
    }
    let power = power.mul_add(rest * rest, rest) + 1.0;
    let exponent =
        (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(127);
    power * f32::from_bits((exponent as u32) << 23)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::pool::bf16;

    fn levels() -> impl Iterator<Item = SimdLevel> {
        [SimdLevel::Avx2, SimdLevel::Avx512].into_iter().filter(|level| level.is_here())
    }

    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mixed = |at: u64| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31) >> 40;
        (0..count as u64).map(|at| mixed(at * 7 + 1) as f32 / 4_000_000.0 - 2.0).collect()
    }

    fn bits(numbers: &[f32]) -> Vec<u32> {
        numbers.iter().map(|number| number.to_bits()).collect()
    }

    /// Computes the result of `multiply` without lanes, tiles or blocks.
    fn by_hand(row: &[f32], vector: &[f32], parts: usize) -> f32 {
        let width = row.len() / parts;
        let part = |part: usize| {
            let mut lanes = [0.0_f32; 16];
            for at in 0..width {
                let (a, b) = (row[part * width + at], vector[part * width + at]);
                lanes[at % 16] = a.mul_add(b, lanes[at % 16]);
            }
            for half in [8, 4, 2, 1] {
                for lane in 0..half {
                    lanes[lane] += lanes[lane + half];
                }
            }
            lanes[0]
        };
        tree(&mut (0..parts).map(part).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn products_have_the_same_bits_at_each_level_and_beside_any_others(
            rows in 1..11_usize, count in 1..70_usize, width in 1..50_usize, log in 0..4_u32, pad in 0..5_usize,
            seed: u64,
        ) {
            let parts = 1 << log;
            let (cols, stride) = (width * parts, width * parts + pad);
            let (wide, values) = (numbers(rows * stride, seed), numbers(count * cols, !seed));
            let half: Vec<u16> = wide.iter().map(|number| bf16(*number)).collect();
            let rounded: Vec<f32> = half.iter().map(|half| f32::from_bits(u32::from(*half) << 16)).collect();
            let vectors = Vectors { numbers: &values, stride: cols, count };
            for level in levels().chain([SimdLevel::Portable]) {
                let mut out = [vec![0.0; rows * count], vec![0.0; rows * count]];
                let [first, second] = &mut out;
                let matrix = Matrix { numbers: &wide[..], stride, cols, parts };
                multiply(level, matrix, 0..rows, vectors, SharedOutput::new(first), rows);
                let matrix = Matrix { numbers: &half[..], stride, cols, parts };
                multiply(level, matrix, 0..rows, vectors, SharedOutput::new(second), rows);
                for (out, matrix) in out.iter().zip([&wide, &rounded]) {
                    for (at, got) in out.iter().enumerate() {
                        let row = &matrix[at % rows * stride..][..cols];
                        let expected = by_hand(row, &values[at / rows * cols..][..cols], parts);
                        prop_assert_eq!(got.to_bits(), expected.to_bits(), "{:?}", level);
                    }
                }
            }
        }

        #[test]
        fn the_other_kernels_have_the_same_bits_at_each_level(len in 1..200_usize, rows in 1..20_usize, seed: u64) {
            let (values, others) = (numbers(len, seed), numbers(len * rows, !seed));
            let weights = numbers(rows, seed.rotate_left(7));
            let all = |level| {
                let mut four = [values.clone(), values.clone(), values.clone(), values.clone()];
                norm(level, &mut four[0], &others[..len], 1e-6);
                gate(level, &mut four[1], &others[..len]);
                softmax(level, &mut four[2], 3.0);
                accumulate(level, &mut four[3], &weights, &others);
                four.map(|numbers| bits(&numbers))
            };
            for level in levels() {
                prop_assert_eq!(all(level), all(SimdLevel::Portable), "{:?}", level);
            }
        }
    }

    /// Reports if the properties above did not compare all levels, because this processor lacks
    /// one.
    #[test]
    fn this_processor_has_each_level() {
        if !SimdLevel::Avx512.is_here() {
            let test = "this_processor_has_each_level";
            let why = "this processor has no AVX-512: its kernels were not compared";
            kvx_testkit::skip(test, why, "run the tests on x86-64 with AVX-512");
        }
    }

    #[test]
    fn the_exponential_is_right_to_two_units_in_the_last_place() {
        for step in -8700..=8800 {
            let x = step as f32 / 100.0;
            let (ours, right) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours / right - 1.0).abs() < 2.4e-7, "exp({x}) is {ours}, not {right}");
        }
        assert!(exp(-1000.0) < 1e-37 && exp(1000.0) > 1e38 && exp(f32::NAN).is_nan());
    }

    #[test]
    fn weights_of_scores_add_up_to_one() {
        let mut scores = numbers(100, 5);
        softmax(SimdLevel::detect(), &mut scores, 2.0);
        assert!((scores.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{scores:?}");
    }
}
