"""IEEE half precision as storage: to float exactly, from float rounded to nearest, ties to even.

Bit operations, so that loops over them become vector instructions at every CPU level, or for whole lines what CPUs from
v3 on and those of aarch64 have for it, without which single steps take up to twice as long.  Neither depends on how the
processor treats subnormals.
"""
from libc.stdint cimport INT32_MIN, int32_t, uint16_t

ctypedef uint16_t half

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static inline int32_t bits_of_float(float x) { int32_t i; memcpy(&i, &x, sizeof x); return i; }
    static inline float float_of_bits(int32_t i) { float x; memcpy(&x, &i, sizeof x); return x; }
    #if defined(__F16C__)
    #include <immintrin.h>
    enum { CONVERTS = 1 };
    static inline void line_to_float(float *dst, const uint16_t *src) {
    #if defined(__AVX512F__)
        _mm512_storeu_ps(dst, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) src)));
    #else
        for (int l = 0; l < 16; l += 8)
            _mm256_storeu_ps(dst + l, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (src + l))));
    #endif
    }
    static inline void line_to_half(uint16_t *dst, const float *src) {
        const __m256i sign = _mm256_set1_epi16((short) 0x8000), infinity = _mm256_set1_epi16(0x7c00);
    #if defined(__AVX512F__)
        const __m256i h = _mm512_cvtps_ph(_mm512_loadu_ps(src), _MM_FROUND_TO_NEAREST_INT);
    #else
        const __m256i h = _mm256_set_m128i(_mm256_cvtps_ph(_mm256_loadu_ps(src + 8), _MM_FROUND_TO_NEAREST_INT),
                                           _mm256_cvtps_ph(_mm256_loadu_ps(src), _MM_FROUND_TO_NEAREST_INT));
    #endif
        /* NaNs lose what they carry. */
        const __m256i nan = _mm256_or_si256(_mm256_and_si256(h, sign), _mm256_set1_epi16(0x7e00));
        const __m256i is_nan = _mm256_cmpgt_epi16(_mm256_andnot_si256(sign, h), infinity);
        _mm256_storeu_si256((__m256i *) dst, _mm256_blendv_epi8(h, nan, is_nan));
    }
    #elif defined(__aarch64__)
    #include <arm_neon.h>
    enum { CONVERTS = 1 };
    static inline void line_to_float(float *dst, const uint16_t *src) {
        for (int l = 0; l < 16; l += 4)
            vst1q_f32(dst + l, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(src + l))));
    }
    static inline void line_to_half(uint16_t *dst, const float *src) {
        const uint16x8_t sign = vdupq_n_u16(0x8000);
        for (int l = 0; l < 16; l += 8) {
            const float16x4_t low = vcvt_f16_f32(vld1q_f32(src + l)), high = vcvt_f16_f32(vld1q_f32(src + l + 4));
            const uint16x8_t h = vcombine_u16(vreinterpret_u16_f16(low), vreinterpret_u16_f16(high));
            /* NaNs lose what they carry. */
            const uint16x8_t nan = vorrq_u16(vandq_u16(h, sign), vdupq_n_u16(0x7e00));
            vst1q_u16(dst + l, vbslq_u16(vcgtq_u16(vbicq_u16(h, sign), vdupq_n_u16(0x7c00)), nan, h));
        }
    }
    #else
    enum { CONVERTS = 0 };
    static inline void line_to_float(float *dst, const uint16_t *src) { (void) dst; (void) src; }
    static inline void line_to_half(uint16_t *dst, const float *src) { (void) dst; (void) src; }
    #endif
    """
    enum:
        CONVERTS  # whether there are instructions for it: the same for 16 values
    void line_to_float(float *dst, const uint16_t *src) noexcept nogil
    void line_to_half(uint16_t *dst, const float *src) noexcept nogil
    int32_t bits_of_float(float x) noexcept nogil
    float float_of_bits(int32_t i) noexcept nogil


cdef inline float half_to_float(half h) noexcept nogil:
    cdef int32_t magnitude = (h & 0x7fff) << 13  # exponent and fraction where float has its lowest five and highest ten
    cdef int32_t subnormal = -(magnitude < (1 << 23))  # masks, as compilers unroll short loops with choices in them
    cdef int32_t special = -(magnitude >= (31 << 23))
    # The biases differ by 127 - 15 = 112. Infinity and NaN have the highest exponent in both: 31 becomes 255.
    # A subnormal is fraction * 2**-24: with the exponent of 2**-14 it has a leading one too many, which is subtracted.
    cdef int32_t exponent = (112 << 23) + (special & (112 << 23)) + (subnormal & (1 << 23))
    cdef float x = float_of_bits(magnitude + exponent) - float_of_bits(subnormal & (113 << 23))
    return float_of_bits(bits_of_float(x) | (-<int32_t> (h >> 15) & INT32_MIN))


cdef inline half float_to_half(float x) noexcept nogil:
    """Infinity from 65520 on; every NaN becomes the quiet one of its sign."""
    cdef int32_t bits = bits_of_float(x), magnitude = bits & 0x7fffffff
    # 13 bits of the fraction go: add just under half of the last place that stays, and one more if that place is odd.
    cdef int32_t result = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13
    # Below 2**-14 the last place of a half is 2**-24, that of 0.5 in float: the addition rounds.
    cdef int32_t small = bits_of_float(float_of_bits(magnitude) + <float> 0.5) - (126 << 23)
    cdef int32_t special = 0x7e00 if magnitude > (255 << 23) else 0x7c00
    result = small if magnitude < (113 << 23) else result
    result = special if magnitude >= (143 << 23) else result
    return <half> (result | (bits >> 16 & 0x8000))
