/* A row of activations becomes codes of 8 bits: integer.pxd says how. */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
enum { QUAD = 4, MOST_K = 1 << 16, READ_PAST = 16 * 4 * 64 };
typedef void (*Product)(
    float *, const float *, const uint8_t *, ptrdiff_t, const char *, ptrdiff_t, const int8_t *, ptrdiff_t,
    ptrdiff_t, ptrdiff_t);
typedef struct { Product add; int wide; void (*decide)(void); } ProductInUse;
static ProductInUse *integer_product;  /* where `_integer.pyx` says which one is in use */
typedef struct { float scale; int32_t correction; char rest[56]; } RowHead;
typedef int32_t float_bits __attribute__((may_alias));

/* Whether the product in use reads wide rows; the first row of a process decides which product that is. */
static inline int reads_wide_rows(void) {
    if (__builtin_expect(__atomic_load_n(&integer_product->add, __ATOMIC_ACQUIRE) == NULL, 0))
        integer_product->decide();
    return integer_product->wide;
}

#define INLINED_PIECE static inline __attribute__((always_inline))

/* codes := n values of v / scale, rounded to the nearest even; their sum is added to `sum` */
INLINED_PIECE void quantize_values(
    int8_t *restrict codes, const float *restrict v, ptrdiff_t n, float scale, uint32_t *restrict sum
) {
    uint32_t total = 0;
    for (ptrdiff_t k = 0; k < n; k++) {
        /* 1.5 * 2^23 leaves an integer in the lower bits of the sum. */
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
INLINED_PIECE void store_four(int8_t *codes, __m128i values) {
    const __m128i pairs = _mm_packs_epi32(values, values);
    const int32_t four = _mm_cvtsi128_si32(_mm_packs_epi16(pairs, pairs));
    memcpy(codes, &four, sizeof four);
}

INLINED_PIECE uint32_t sum_of_four(__m128i values) {
    values = _mm_add_epi32(values, _mm_shuffle_epi32(values, 0x4e));
    return (uint32_t) _mm_cvtsi128_si32(_mm_add_epi32(values, _mm_shuffle_epi32(values, 0xb1)));
}

/* `quantize_values` for a multiple of 4 */
INLINED_PIECE void quantize_fours(int8_t *codes, const float *v, ptrdiff_t n, float scale, uint32_t *sum) {
    __m128i total = _mm_setzero_si128();
    for (ptrdiff_t k = 0; k < n; k += 4) {
        const __m128i four = _mm_cvtps_epi32(_mm_div_ps(_mm_loadu_ps(v + k), _mm_set1_ps(scale)));
        store_four(codes + k, four);
        total = _mm_add_epi32(total, four);
    }
    *sum += sum_of_four(total);
}

/* wide [n / 4 quads][codes of k = 0, 2, 1 and 3], each of 16 bits, := n codes of 8 bits; n is a multiple of 16 */
static inline void widen_codes(int16_t *restrict wide, const int8_t *restrict codes, ptrdiff_t n) {
    for (ptrdiff_t k = 0; k < n; k += 16) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *) (codes + k)), odd = _mm_srai_epi16(bytes, 8);
        const __m128i even = _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 8);
        _mm_storeu_si128((__m128i *) (wide + k), _mm_unpacklo_epi32(even, odd));
        _mm_storeu_si128((__m128i *) (wide + k + 8), _mm_unpackhi_epi32(even, odd));
    }
}
#else
#define quantize_fours quantize_values
#define widen_codes(wide, codes, n) ((void) 0)  /* no product reads them */
#endif

/* `quantize_values` in vectors.  Compilers would leave up to 15 of the last values to instructions for one. */
INLINED_PIECE void quantize_in_vectors(int8_t *codes, const float *v, ptrdiff_t n, float scale, uint32_t *sum) {
    const ptrdiff_t most = n / 32 * 32, fours = n / 4 * 4;
    if (most > 0)
        quantize_values(codes, v, most, scale, sum);
    if (fours > most)
        quantize_fours(codes + most, v + most, fours - most, scale, sum);
    if (n > fours)
        quantize_values(codes + fours, v + fours, n - fours, scale, sum);
}

/* row (`bytes_of_row`) := head and codes of the n values of v */
static __attribute__((noinline)) void quantize_row(float *restrict row, const float *restrict v, ptrdiff_t n) {
    const float_bits *bits = (const float_bits *) v;
    int32_t most = 0;
    uint32_t sum = 0;  /* of more than MOST_K codes, which nobody reads, it may wrap */
    RowHead *head = (RowHead *) row;
    int8_t *codes = (int8_t *) (head + 1);
    const ptrdiff_t end = (n + 63) / 64 * 64;  /* AMX reads as much */
    float scale;
    for (ptrdiff_t k = 0; k < n; k++) {
        const int32_t size = bits[k] & 0x7fffffff;
        most = size > most ? size : most;
    }
    if (most >= 0x7f800000) {
        scale = __builtin_nanf("");
        memset(codes, 0, n);
    } else {
        memcpy(&scale, &most, sizeof scale);
        scale /= 127.0f;
        scale = scale > 0x1p-126f ? scale : 0x1p-126f;
        quantize_in_vectors(codes, v, n, scale, &sum);
    }
    for (ptrdiff_t k = n; k < end; k++)
        codes[k] = 0;
    head->scale = scale;
    head->correction = (int32_t) (-128u * sum);
    if (reads_wide_rows())
        widen_codes((int16_t *) (codes + end), codes, end);
}
