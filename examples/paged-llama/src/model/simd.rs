//! Computes with sixteen numbers at a time, with the processor's best instructions. All levels
//! round alike: each product is added by one fused operation, and the sixteen sums are added as a
//! tree. So a result has the same bits at each level.

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// Any processor; slow if it has no fused multiply-add.
    Portable,
    /// Eight numbers at a time, fused.
    Avx2,
    /// Sixteen numbers at a time.
    Avx512,
}

impl SimdLevel {
    /// Returns the best level of this machine.
    pub fn detect() -> SimdLevel {
        [SimdLevel::Avx512, SimdLevel::Avx2]
            .into_iter()
            .find(|level| level.is_here())
            .unwrap_or(SimdLevel::Portable)
    }

    /// Returns whether this machine supports the level.
    pub fn is_here(self) -> bool {
        match self {
            SimdLevel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => SimdLevel::Avx2.is_here() && is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

/// Sixteen sums. An implementation for an instruction set is used only if the processor supports
/// that.
pub(super) trait Lanes: Copy {
    fn zero() -> Self;
    fn load(from: &[f32; 16]) -> Self;
    fn load_bf16(from: &[u16; 16]) -> Self;
    /// Returns `self + a * b`, rounded once.
    fn add_product(self, a: Self, b: Self) -> Self;
    /// Returns the sum, adding halves to halves.
    fn sum(self) -> f32;
}

/// A number in the format of the weights.
pub(super) trait Element: Copy + Send + Sync {
    const ZERO: Self;
    fn lanes<L: Lanes>(from: &[Self; 16]) -> L;
}

impl Element for f32 {
    const ZERO: f32 = 0.0;
    #[inline(always)]
    fn lanes<L: Lanes>(from: &[f32; 16]) -> L {
        L::load(from)
    }
}

impl Element for u16 {
    const ZERO: u16 = 0;
    #[inline(always)]
    fn lanes<L: Lanes>(from: &[u16; 16]) -> L {
        L::load_bf16(from)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 16]);

impl Lanes for Portable {
    #[inline(always)]
    fn zero() -> Self {
        Portable([0.0; 16])
    }

    #[inline(always)]
    fn load(from: &[f32; 16]) -> Self {
        Portable(*from)
    }

    #[inline(always)]
    fn load_bf16(from: &[u16; 16]) -> Self {
        Portable(from.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }

    #[inline(always)]
    fn add_product(mut self, a: Self, b: Self) -> Self {
        for ((sum, a), b) in self.0.iter_mut().zip(a.0).zip(b.0) {
            *sum = a.mul_add(b, *sum);
        }
        self
    }

    #[inline(always)]
    fn sum(mut self) -> f32 {
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                self.0[lane] += self.0[lane + half];
            }
        }
        self.0[0]
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use crate::model::simd::Lanes;

    #[derive(Clone, Copy)]
    pub(in crate::model) struct Avx2(__m256, __m256);

    #[derive(Clone, Copy)]
    pub(in crate::model) struct Avx512(__m512);

    impl Lanes for Avx2 {
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: the trait's contract ensures that the processor has AVX2 and FMA.
            unsafe { Avx2(_mm256_setzero_ps(), _mm256_setzero_ps()) }
        }

        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            // SAFETY: the trait's contract ensures that the processor has AVX2 and FMA; the array
            // has 16 numbers.
            unsafe { Avx2(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))) }
        }

        #[inline(always)]
        fn load_bf16(from: &[u16; 16]) -> Self {
            // SAFETY: the trait's contract ensures that the processor has AVX2 and FMA; the array
            // has 16 numbers.
            unsafe {
                let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(8).cast()));
                let low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low));
                Avx2(low, _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)))
            }
        }

        #[inline(always)]
        fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: the trait's contract ensures that the processor has AVX2 and FMA.
            unsafe { Avx2(_mm256_fmadd_ps(a.0, b.0, self.0), _mm256_fmadd_ps(a.1, b.1, self.1)) }
        }

        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: the trait's contract ensures that the processor has AVX2 and FMA.
            unsafe { sum_of_8(_mm256_add_ps(self.0, self.1)) }
        }
    }

    impl Lanes for Avx512 {
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: the trait's contract ensures that the processor has AVX-512.
            unsafe { Avx512(_mm512_setzero_ps()) }
        }

        #[inline(always)]
        fn load(from: &[f32; 16]) -> Self {
            // SAFETY: the trait's contract ensures that the processor has AVX-512; the array has 16
            // numbers.
            unsafe { Avx512(_mm512_loadu_ps(from.as_ptr())) }
        }

        #[inline(always)]
        fn load_bf16(from: &[u16; 16]) -> Self {
            // SAFETY: the trait's contract ensures that the processor has AVX-512; the array has 16
            // numbers.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
            }
        }

        #[inline(always)]
        fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: the trait's contract ensures that the processor has AVX-512.
            unsafe { Avx512(_mm512_fmadd_ps(a.0, b.0, self.0)) }
        }

        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: the trait's contract ensures that the processor has AVX-512.
            unsafe {
                let low = _mm512_castps512_ps256(self.0);
                let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
                sum_of_8(_mm256_add_ps(low, high))
            }
        }
    }

    /// # Safety
    /// The processor must have AVX2.
    #[inline(always)]
    unsafe fn sum_of_8(eight: __m256) -> f32 {
        // SAFETY: the caller ensures that the processor has AVX2.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}
