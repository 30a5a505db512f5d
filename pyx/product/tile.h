/* What the register tile needs of C: the sizes of vectors and panels at each CPU level, shuffles, prefetching. */
#pragma once
#include "product/integer_product.h"
#include "product/real.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif
enum { LF = 16, REAL_BYTES = sizeof(real), LANES = LINE_BYTES / REAL_BYTES, LINES = 4 };
/* SPANS is the schedule of the register tile.  A tile multiplies some rows with some lines of a block.  It takes the
   lines in spans of neighbouring vectors, each for all k of the block before the next span.  SPANS[rows - 1][lines - 1]
   lists the lengths of the spans in order, in vectors, of which a line has VECTORS.  The table has a row for each number
   of rows, from 1 on, and columns for 1, 2, 3 and 4 lines.  For example, 4 rows and 4 lines at v3, where a line has two
   vectors, are {3, 3, 2}: a line and a half, the other half and a line, a line.

   A span has a sum for each row and vector, and each sum is a register.  There are at most ACCUMULATORS of them, because
   weights and factors of A need registers too.  There should be ten: a multiply-add takes up to five cycles and has to
   wait for the one before it in the same sum, while a CPU begins two a cycle.  So few rows take several lines at once,
   and one line and a half where one has too few sums and two have too many.

   A span begins with a line, or in a line where a span of the same length ends.  At v4 it is a whole sub-panel.  Results
   do not depend on the spans, because each column has its own sums.  test_object_code.py reads this table. */
#if defined(__AVX512F__)  /* v4 */
enum { VECTOR_BYTES = 64, ROWS = 6, SUB_LINES = 4 };  /* 32 registers: 6 x 4; 12 x 2 load 14 for 10 */
static const unsigned char SPANS[ROWS][LINES][LINES] = {
    {{1}, {2}, {3}, {4}},
    {{1}, {2}, {3}, {4}},
    {{1}, {2}, {3}, {4}},
    {{1}, {2}, {3}, {4}},
    {{1}, {2}, {3}, {4}},
    {{1}, {2}, {3}, {4}},
};
#elif defined(__AVX2__)  /* v3 */
enum { VECTOR_BYTES = 32, ROWS = 6, SUB_LINES = 1 };  /* 16 registers: 6 x 2 */
static const unsigned char SPANS[ROWS][LINES][LINES] = {
    {{2}, {4},    {6},       {8}},
    {{2}, {4},    {6},       {4, 4}},
    {{2}, {4},    {3, 3},    {4, 4}},
    {{2}, {2, 2}, {3, 3},    {3, 3, 2}},
    {{2}, {2, 2}, {2, 2, 2}, {2, 2, 2, 2}},
    {{2}, {2, 2}, {2, 2, 2}, {2, 2, 2, 2}},
};
#elif defined(__aarch64__)  /* aarch64 */
enum { VECTOR_BYTES = 16, ROWS = 5, SUB_LINES = 1 };  /* 32 registers: 5 x 4, as 6 x 4 leave too few */
static const unsigned char SPANS[ROWS][LINES][LINES] = {
    {{4}, {8},    {12},      {16}},
    {{4}, {8},    {6, 6},    {8, 8}},
    {{4}, {4, 4}, {6, 6},    {6, 6, 4}},
    {{4}, {4, 4}, {4, 4, 4}, {4, 4, 4, 4}},
    {{4}, {4, 4}, {4, 4, 4}, {4, 4, 4, 4}},
};
#else  /* base */
enum { VECTOR_BYTES = 16, ROWS = 3, SUB_LINES = 1 };  /* 16 registers: 3 x 4 */
static const unsigned char SPANS[ROWS][LINES][LINES] = {
    {{4}, {4, 4}, {4, 4, 4}, {4, 4, 4, 4}},
    {{4}, {4, 4}, {4, 4, 4}, {4, 4, 4, 4}},
    {{4}, {4, 4}, {4, 4, 4}, {4, 4, 4, 4}},
};
#endif
enum { VECTORS = LINE_BYTES / VECTOR_BYTES,
       ACCUMULATORS = ROWS * SUB_LINES * VECTORS,
       ROW_PANELS = VECTORS > 1 ? 1 : 2, ROW_PANELS_OF_3 = VECTORS > 2 ? 1 : VECTORS > 1 ? 2 : 3,
       ROW_ACCUMULATORS = (4 * ROW_PANELS > 3 * ROW_PANELS_OF_3 ? 4 * ROW_PANELS : 3 * ROW_PANELS_OF_3) * VECTORS,
       BLOCK = 64, ROW_BLOCK = 256, PACK_ROWS = 8, ROW_CHAINS = ROW_BLOCK / BLOCK, GROUP_TILES = 4,
       LATENCY_ROWS = ROWS * 2 / 3, TILE_SIZE = ROWS * LINES * LF };
typedef real vec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
/* Whether a span of so many rows has nv vectors, and not just a line.  This is a constant 0 if the rows have no such span
   in SPANS, so that the tile is compiled for spans that there are, and no others. */
#define HAS_SPAN(spans, nv) (spans[0] == nv || spans[1] == nv || spans[2] == nv || spans[3] == nv)
#define IS_SPAN(rows, span, nv) (nv != VECTORS && ( \
    HAS_SPAN(SPANS[(rows) - 1][0], nv) || HAS_SPAN(SPANS[(rows) - 1][1], nv) \
    || HAS_SPAN(SPANS[(rows) - 1][2], nv) || HAS_SPAN(SPANS[(rows) - 1][3], nv)) && (span) == nv)
/* Types of so many bytes as a tile has rows: Cython makes a function for each type. */
typedef char one_row[1], two_rows[2], three_rows[3], four_rows[4], five_rows[5], six_rows[6];
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
#define ALWAYS_INLINE_SIZE __attribute__((always_inline)) ptrdiff_t
#define NOINLINE_VOID __attribute__((noinline, flatten)) void  /* a call of sigmoid or tanh would leave a loop scalar */
#else
#define ALWAYS_INLINE_VOID void
#define ALWAYS_INLINE_SIZE ptrdiff_t
#define NOINLINE_VOID void
#endif
