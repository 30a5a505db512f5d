/* What the register tile needs of C: the sizes of vectors and panels at each CPU level, shuffles, prefetching. */
#pragma once
#include "product/integer_product.h"
#include "product/real.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, ROWS = 6, SUB_LINES = 4, SPAN_LINES = 0 };  /* 32 registers: 6 x 4; 12 x 2 load 14 for 10 */
#elif defined(__AVX2__)
enum { VECTOR_BYTES = 32, ROWS = 6, SUB_LINES = 1, SPAN_LINES = 0 };  /* 16 registers: 6 x 2 */
#elif defined(__aarch64__)
enum { VECTOR_BYTES = 16, ROWS = 5, SUB_LINES = 1, SPAN_LINES = 1 };  /* 32 registers: 5 x 4, as 6 x 4 leave too few */
#else
enum { VECTOR_BYTES = 16, ROWS = 3, SUB_LINES = 1, SPAN_LINES = 0 };  /* 16 registers: 3 x 4 */
#endif
enum { LF = 16, LD = 8, LINES = 4, VECTORS = LINE_BYTES / VECTOR_BYTES,
       ACCUMULATORS = ROWS * SUB_LINES * VECTORS,
       ROW_PANELS = VECTORS > 1 ? 1 : 2, ROW_PANELS_OF_3 = VECTORS > 2 ? 1 : VECTORS > 1 ? 2 : 3,
       ROW_ACCUMULATORS = (4 * ROW_PANELS > 3 * ROW_PANELS_OF_3 ? 4 * ROW_PANELS : 3 * ROW_PANELS_OF_3) * VECTORS,
       BLOCK = 64, ROW_BLOCK = 256, PACK_ROWS = 8, ROW_CHAINS = ROW_BLOCK / BLOCK, GROUP_TILES = 4,
       LATENCY_ROWS = ROWS * 2 / 3, TILE_SIZE = ROWS * LINES * LF };
typedef real vec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
/* Vectors that are transposed have at most 32 bytes, since Zen 4 executes instructions with 64 in two halves. */
enum { SQUARES_BYTES = VECTOR_BYTES < 32 ? VECTOR_BYTES : 32, SQUARES_VECTORS = LINE_BYTES / SQUARES_BYTES };
typedef float squaresf __attribute__((vector_size(SQUARES_BYTES), aligned(4), may_alias));
typedef double squaresd __attribute__((vector_size(SQUARES_BYTES), aligned(8), may_alias));
/* The elements of two vectors that x86's unpack instructions join; they transpose squares of 16 bytes by 16 bytes, of
   which a vector holds SQUARES_BYTES / 16 side by side. */
#if defined(__AVX2__)
#define UNPACK_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define UNPACK_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define UNPACK_LOW_PAIRS 0, 1, 8, 9, 4, 5, 12, 13
#define UNPACK_HIGH_PAIRS 2, 3, 10, 11, 6, 7, 14, 15
#define UNPACK_LOW_DOUBLES 0, 4, 2, 6
#define UNPACK_HIGH_DOUBLES 1, 5, 3, 7
#else
#define UNPACK_LOW 0, 4, 1, 5
#define UNPACK_HIGH 2, 6, 3, 7
#define UNPACK_LOW_PAIRS 0, 1, 4, 5
#define UNPACK_HIGH_PAIRS 2, 3, 6, 7
#define UNPACK_LOW_DOUBLES 0, 2
#define UNPACK_HIGH_DOUBLES 1, 3
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, mask, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int maskf __attribute__((vector_size(SQUARES_BYTES)));
typedef long long maskd __attribute__((vector_size(SQUARES_BYTES)));
#define SHUFFLE(a, b, mask, ...) __builtin_shuffle(a, b, (mask) {__VA_ARGS__})
#endif
#define unpack_low(a, b) SHUFFLE(a, b, maskf, UNPACK_LOW)
#define unpack_high(a, b) SHUFFLE(a, b, maskf, UNPACK_HIGH)
#define unpack_low_pairs(a, b) SHUFFLE(a, b, maskf, UNPACK_LOW_PAIRS)
#define unpack_high_pairs(a, b) SHUFFLE(a, b, maskf, UNPACK_HIGH_PAIRS)
#define unpack_low_doubles(a, b) SHUFFLE(a, b, maskd, UNPACK_LOW_DOUBLES)
#define unpack_high_doubles(a, b) SHUFFLE(a, b, maskd, UNPACK_HIGH_DOUBLES)
/* Load 16 bytes from each of some rows, which are `stride` bytes apart, side by side into a vector. */
static inline squaresf load_16_bytes_of_rows(const char *row, ptrdiff_t stride) {
#if defined(__AVX2__)
    __m256 joined = _mm256_castps128_ps256(_mm_loadu_ps((const float *) row));
    return (squaresf) _mm256_insertf128_ps(joined, _mm_loadu_ps((const float *) (row + stride)), 1);
#else
    return *(const squaresf *) row;
#endif
}
#define prefetch_write(address) __builtin_prefetch(address, 1)
#define prefetch_read(address) __builtin_prefetch(address, 0, 2)
/* Keep a vector in a register, where all rows of a tile can use it. */
#if defined(__x86_64__)
#define keep_in_register(vector) __asm__("" : "+v"(*(vector)))
#else
#define keep_in_register(vector) (void) (vector)
#endif
static const vec ZERO;
/* x as a factor of several vectors.  gcc for aarch64 would copy some of them to all lanes of a register, which takes as
   long as a multiplication; with x in a register it multiplies by one lane. */
#if defined(__aarch64__) && !defined(__clang__)
static inline real scalar_factor(real x) { __asm__("" : "+w"(x)); return x; }
#else
#define scalar_factor(x) (x)
#endif
/* Return types of functions that are always or never inlined.  The tile's accumulators are registers only where its
   loops have constant bounds (always) and no other code around them (never). */
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wattributes"  /* Cython declares every function of a .pxd inline */
#define ALWAYS_INLINE_VOID __attribute__((always_inline)) void
#define NOINLINE_VOID __attribute__((noinline, flatten)) void  /* a call of sigmoid or tanh would leave a loop scalar */
#else
#define ALWAYS_INLINE_VOID void
#define NOINLINE_VOID void
#endif
