/* Conversions of vectors and whole lines, 16 numbers, between float16 and float, and the bits of single floats. */
#pragma once
#include <stdint.h>
#include <string.h>
#include "product/tile.h"
static inline int32_t bits_of_float(float x) { int32_t i; memcpy(&i, &x, sizeof x); return i; }
static inline float float_of_bits(int32_t i) { float x; memcpy(&x, &i, sizeof x); return x; }
#if defined(__AVX2__)  /* v3 and v4, which have F16C */
enum { HAS_LINE_CONVERSIONS = 1 };
/* Return vector v of a line, as floats. */
static inline vec dequantize_vector(const uint16_t *line, int v) {
#if defined(__AVX512F__)
    (void) v;
    return (vec) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) line));
#else
    return (vec) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) line + v));
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
    /* Every NaN becomes the quiet one of its sign. */
    const __m256i nan = _mm256_or_si256(_mm256_and_si256(h, sign), _mm256_set1_epi16(0x7e00));
    const __m256i is_nan = _mm256_cmpgt_epi16(_mm256_andnot_si256(sign, h), infinity);
    _mm256_storeu_si256((__m256i *) dst, _mm256_blendv_epi8(h, nan, is_nan));
}
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { HAS_LINE_CONVERSIONS = 1 };
static inline vec dequantize_vector(const uint16_t *line, int v) {
    return (vec) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(line + 4 * v)));
}
static inline void line_to_half(uint16_t *dst, const float *src) {
    const uint16x8_t sign = vdupq_n_u16(0x8000);
    for (int l = 0; l < 16; l += 8) {
        const float16x4_t low = vcvt_f16_f32(vld1q_f32(src + l)), high = vcvt_f16_f32(vld1q_f32(src + l + 4));
        const uint16x8_t h = vcombine_u16(vreinterpret_u16_f16(low), vreinterpret_u16_f16(high));
        /* Every NaN becomes the quiet one of its sign. */
        const uint16x8_t nan = vorrq_u16(vandq_u16(h, sign), vdupq_n_u16(0x7e00));
        vst1q_u16(dst + l, vbslq_u16(vcgtq_u16(vbicq_u16(h, sign), vdupq_n_u16(0x7c00)), nan, h));
    }
}
#else
enum { HAS_LINE_CONVERSIONS = 0 };
static inline vec dequantize_vector(const uint16_t *line, int v) { (void) line; (void) v; return ZERO; }
static inline void line_to_half(uint16_t *dst, const float *src) { (void) dst; (void) src; }
#endif
static inline void line_to_float(float *dst, const uint16_t *src) {
    for (int v = 0; v < VECTORS; v++)
        ((vec *) dst)[v] = dequantize_vector(src, v);
}
