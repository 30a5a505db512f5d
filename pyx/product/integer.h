/* Rows of activations are quantized to 8 bits, as integer.pxd defines.
   Letters: k a value of a row, n how many; v values, codes their codes, sum the sum of codes, which is added to. */
#pragma once
#include <string.h>
#include "product/integer_product.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
enum { QUAD = 4, HEAD_BYTES = LINE_BYTES, MOST_K = 1 << 16, READ_PAST = 16 * 4 * 64 };
static ProductInUse *integer_product;  /* that of `_integer.pyx`, set by `use_product` */
typedef int32_t float_bits __attribute__((may_alias));

/* Return whether the product in use reads wide codes.  The first row of a process selects a product. */
static inline int reads_wide_codes(void) {
    if (__builtin_expect(__atomic_load_n(&integer_product->add, __ATOMIC_ACQUIRE) == NULL, 0))
        integer_product->select();
    return integer_product->reads_wide_codes;
}

/* Quantize n values: codes := v / scale, rounded to the nearest even. */
ALWAYS_INLINE void quantize_values(
    int8_t *restrict codes, const float *restrict v, ptrdiff_t n, float scale, uint32_t *restrict sum
) {
    uint32_t total = 0;
    for (ptrdiff_t k = 0; k < n; k++) {
        /* Adding 1.5 * 2^23 leaves the rounded integer in the lower bits. */
        const float shifted = v[k] / scale + 12582912.0f;
        int32_t code;
        memcpy(&code, &shifted, sizeof code);
        code -= 0x4b400000;
        codes[k] = (int8_t) code;
        total += code;
    }
    *sum += total;
}

#if defined(__SSE2__)
/* Store 4 integers as codes of 8 bits. */
ALWAYS_INLINE void store_4_codes(int8_t *codes, __m128i values) {
    const __m128i pairs = _mm_packs_epi32(values, values);
    const int32_t four = _mm_cvtsi128_si32(_mm_packs_epi16(pairs, pairs));
    memcpy(codes, &four, sizeof four);
}

/* Return the sum of 4 integers. */
ALWAYS_INLINE uint32_t sum_of_4(__m128i values) {
    values = _mm_add_epi32(values, _mm_shuffle_epi32(values, 0x4e));
    return (uint32_t) _mm_cvtsi128_si32(_mm_add_epi32(values, _mm_shuffle_epi32(values, 0xb1)));
}

/* Quantize n values, a multiple of 4. */
ALWAYS_INLINE void quantize_by_4(int8_t *codes, const float *v, ptrdiff_t n, float scale, uint32_t *sum) {
    __m128i total = _mm_setzero_si128();
    for (ptrdiff_t k = 0; k < n; k += 4) {
        const __m128i four = _mm_cvtps_epi32(_mm_div_ps(_mm_loadu_ps(v + k), _mm_set1_ps(scale)));
        store_4_codes(codes + k, four);
        total = _mm_add_epi32(total, four);
    }
    *sum += sum_of_4(total);
}

/* Widen n codes, a multiple of 16, to 16 bits: wide [n / 4 quads][k = 0, 2, 1 and 3 of the quad]. */
static inline void widen_codes(int16_t *restrict wide, const int8_t *restrict codes, ptrdiff_t n) {
    for (ptrdiff_t k = 0; k < n; k += 16) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *) (codes + k)), odd = _mm_srai_epi16(bytes, 8);
        const __m128i even = _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 8);
        _mm_storeu_si128((__m128i *) (wide + k), _mm_unpacklo_epi32(even, odd));
        _mm_storeu_si128((__m128i *) (wide + k + 8), _mm_unpackhi_epi32(even, odd));
    }
}
#else
#define quantize_by_4 quantize_values
#define widen_codes(wide, codes, n) ((void) 0)  /* because no product reads them */
#endif

/* Quantize n values, almost all in vectors: compilers would quantize up to 15 of the last values one by one. */
ALWAYS_INLINE void quantize_all(int8_t *codes, const float *v, ptrdiff_t n, float scale, uint32_t *sum) {
    const ptrdiff_t by_32 = n / 32 * 32, by_4 = n / 4 * 4;
    if (by_32 > 0)
        quantize_values(codes, v, by_32, scale, sum);
    if (by_4 > by_32)
        quantize_by_4(codes + by_32, v + by_32, by_4 - by_32, scale, sum);
    if (n > by_4)
        quantize_values(codes + by_4, v + by_4, n - by_4, scale, sum);
}

/* Quantize the n values of v to a row of `quantized_row_bytes`: its head, its codes, and perhaps wide codes. */
static __attribute__((noinline)) void quantize_row(float *restrict row, const float *restrict v, ptrdiff_t n) {
    const float_bits *bits = (const float_bits *) v;
    int32_t largest = 0;
    uint32_t sum = 0;  /* wraps for more than MOST_K codes, where its correction is not read */
    Head *head = (Head *) row;
    int8_t *codes = (int8_t *) row + HEAD_BYTES;
    const ptrdiff_t padded = (n + 63) / 64 * 64;  /* because AMX reads so many */
    float scale;
    for (ptrdiff_t k = 0; k < n; k++) {
        const int32_t magnitude = bits[k] & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= 0x7f800000) {
        scale = __builtin_nanf("");
        memset(codes, 0, n);
    } else {
        memcpy(&scale, &largest, sizeof scale);
        scale /= 127.0f;
        scale = scale > 0x1p-126f ? scale : 0x1p-126f;
        quantize_all(codes, v, n, scale, &sum);
    }
    for (ptrdiff_t k = n; k < padded; k++)
        codes[k] = 0;
    head->scale = scale;
    head->correction = (int32_t) (-128u * sum);
    if (reads_wide_codes())
        widen_codes((int16_t *) (codes + padded), codes, padded);
}
