/* Formats of packed weights, and instructions that dequantize float16 weights on their way into registers. */
#pragma once
#include "tile.h"

enum { UNQUANTIZED, FLOAT16, INT8 };
#if defined(__AVX2__)
enum { HAS_DEQUANTIZE_VECTOR = 1 };
static inline vec dequantize_vector(const char *line, int v) {
#if defined(__AVX512F__)
    (void) v;
    return (vec) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) line));
#else
    return (vec) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) line + v));
#endif
}
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { HAS_DEQUANTIZE_VECTOR = 1 };
static inline vec dequantize_vector(const char *line, int v) {
    return (vec) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) line + 4 * v)));
}
#else
enum { HAS_DEQUANTIZE_VECTOR = 0 };
static inline vec dequantize_vector(const char *line, int v) {
    (void) line; (void) v;
    return ZERO;
}
#endif
