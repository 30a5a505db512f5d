/* Products of quantized rows with panels of int8 weights (integer.pxd), for each instruction set that has one.
   Letters: r a row; g a line of a panel, LINE columns; l a column of a line; q a quad, 4 values of k; v a vector; c a
   chain.  A tile is R rows by N lines or vectors. */
#pragma once
#include <string.h>
#include "product/integer_product.h"
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define X86 1
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#else
#define X86 0
#endif
#if defined(__aarch64__) && (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 11)
#define ARM 1
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#else
#define ARM 0
#endif

/* Parameters of a function that computes sums [rows][4 lines of 16] = a @ panel.
   panel [quads][lines][16][4]; a: the codes of rows, `stride` bytes apart */
#define SUMS_PARAMETERS int32_t *restrict sums, const uint8_t *restrict panel, ptrdiff_t lines, \
    const int8_t *restrict a, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t quads
enum { LINE = 16, ROW_SUMS = 4 * LINE };  /* sums of a line, which a quad fills with its codes; sums of a row */
enum { GROUP_ROWS = 48 };  /* rows of codes whose sums are kept before they go to z */

/* Return the head of row r. */
ALWAYS_INLINE const Head *head_of(const char *heads, ptrdiff_t head_stride, ptrdiff_t r) {
    return (const Head *) (heads + r * head_stride);
}

/* Add a line of sums of a row, which need no correction if the codes of weights are signed, to z. */
ALWAYS_INLINE void add_sums(
    float *restrict z, const int32_t *restrict sums, const Head *restrict head, const float *restrict scales,
    const int signed_weights
) {
    for (int l = 0; l < LINE; l++)
        z[l] += head->scale * scales[l] * (float) (sums[l] + (signed_weights ? 0 : head->correction));
}

/* The body of a product that computes sums with `PRODUCT` first, for GROUP_ROWS rows at a time, and adds them to z. */
#define ADD_SUMS_OF(PRODUCT, SIGNED_WEIGHTS) \
    int32_t group_sums[GROUP_ROWS * ROW_SUMS]; \
    (void) distance; \
    for (ptrdiff_t m; rows > 0; rows -= m, a += m * stride, heads += m * head_stride) { \
        m = rows < GROUP_ROWS ? rows : GROUP_ROWS; \
        PRODUCT(group_sums, panel, lines, a, stride, m, quads); \
        for (ptrdiff_t r = 0; r < m; r++, z += ROW_SUMS) \
            for (ptrdiff_t g = 0; g < lines; g++) \
                add_sums( \
                    z + g * LINE, group_sums + r * ROW_SUMS + g * LINE, head_of(heads, head_stride, r), \
                    scales + g * LINE, SIGNED_WEIGHTS); \
    }

/* ------------------------------------------------------------------------------------------------ any CPU */
static void sums_c(SUMS_PARAMETERS) {
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t g = 0; g < lines; g++) {
            int32_t acc[LINE] = {0};
            for (ptrdiff_t q = 0; q < quads; q++) {
                const uint8_t *w = panel + (q * lines + g) * LINE_BYTES;
                const int8_t *x = a + r * stride + 4 * q;
                for (int l = 0; l < LINE; l++)
                    acc[l] += w[4 * l] * x[0] + w[4 * l + 1] * x[1] + w[4 * l + 2] * x[2] + w[4 * l + 3] * x[3];
            }
            memcpy(sums + r * ROW_SUMS + g * LINE, acc, sizeof acc);
        }
}
static void product_c(PRODUCT_PARAMETERS) { ADD_SUMS_OF(sums_c, 0) }

/* ------------------------------------------------------------ AMX, and stand-ins for its instructions in C
   Tiles 0 to 3 are the sums of up to 16 rows and a line each.  Tile 4 has codes of the rows, and tiles 5 to 7 have
   those of a line, 16 quads each.  Behind the last quads the rows have codes of 0, and the panel has anything. */
typedef struct {
    uint8_t palette, start, zeros[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

static inline void configure_tiles(TileConfig *config, ptrdiff_t rows) {
    memset(config, 0, sizeof *config);
    config->palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        config->bytes[tile] = 64;
        config->rows[tile] = tile < 5 ? (uint8_t) rows : 16;
    }
}

/* Load line G of a panel to tile B and add its products with the rows to tile G. */
#define LINE_OF_TILES(G, B) \
    if (lines > G) { LOAD(B, line + G * LINE_BYTES, lines * LINE_BYTES); MULTIPLY(G, 4, B); }
/* The body of a function that computes sums by CONFIGURE, CLEAR, LOAD, MULTIPLY and STORE, which are AMX or C. */
#define SUMS_BY_TILES \
    TileConfig config; \
    ptrdiff_t configured_rows = 0, m; \
    for (; rows > 0; rows -= m, sums += m * ROW_SUMS, a += m * stride) { \
        m = rows < 16 ? rows : 16; \
        if (m != configured_rows) { configure_tiles(&config, m); CONFIGURE(&config); configured_rows = m; } \
        CLEAR(0); CLEAR(1); CLEAR(2); CLEAR(3); \
        for (ptrdiff_t q = 0; q < quads; q += 16) { \
            const uint8_t *line = panel + q * lines * LINE_BYTES; \
            LOAD(4, a + 4 * q, stride); \
            LINE_OF_TILES(0, 5) LINE_OF_TILES(1, 6) LINE_OF_TILES(2, 7) LINE_OF_TILES(3, 5) \
        } \
        STORE(0, sums, 4 * ROW_SUMS); \
        if (lines > 1) STORE(1, sums + LINE, 4 * ROW_SUMS); \
        if (lines > 2) STORE(2, sums + 2 * LINE, 4 * ROW_SUMS); \
        if (lines > 3) STORE(3, sums + 3 * LINE, 4 * ROW_SUMS); \
    }

typedef struct { TileConfig config; uint8_t data[8][16][64]; } Tiles;

/* Copy the rows of a tile from memory, or with `store` to memory, where they are `stride` bytes apart. */
static void copy_tile(Tiles *tiles, int tile, char *memory, ptrdiff_t stride, int store) {
    for (int r = 0; r < tiles->config.rows[tile]; r++) {
        if (store)
            memcpy(memory + r * stride, tiles->data[tile][r], tiles->config.bytes[tile]);
        else
            memcpy(tiles->data[tile][r], memory + r * stride, tiles->config.bytes[tile]);
    }
}

/* Do as tdpbsud: add to each sum of a row and a column the products of the row's signed bytes with unsigned ones. */
static void multiply_tiles(Tiles *tiles, int sums, int signed_rows, int unsigned_columns) {
    for (int r = 0; r < tiles->config.rows[sums]; r++)
        for (int l = 0; l < LINE; l++) {
            int32_t total;
            memcpy(&total, tiles->data[sums][r] + 4 * l, 4);
            for (int k = 0; k < tiles->config.bytes[signed_rows]; k++)
                total += (int8_t) tiles->data[signed_rows][r][k]
                    * tiles->data[unsigned_columns][k / 4][4 * l + k % 4];
            memcpy(tiles->data[sums][r] + 4 * l, &total, 4);
        }
}
#define CONFIGURE(config_) memcpy(&tiles.config, config_, sizeof tiles.config)
#define CLEAR(tile) memset(tiles.data[tile], 0, sizeof tiles.data[tile])
#define LOAD(tile, memory, stride_) copy_tile(&tiles, tile, (char *) (memory), stride_, 0)
#define STORE(tile, memory, stride_) copy_tile(&tiles, tile, (char *) (memory), stride_, 1)
#define MULTIPLY(sums_, rows_, columns_) multiply_tiles(&tiles, sums_, rows_, columns_)
static void sums_by_tiles_in_c(SUMS_PARAMETERS) { Tiles tiles; SUMS_BY_TILES }
static void product_tiles_in_c(PRODUCT_PARAMETERS) { ADD_SUMS_OF(sums_by_tiles_in_c, 0) }
#undef CONFIGURE
#undef CLEAR
#undef LOAD
#undef STORE
#undef MULTIPLY

/* ------------------------------------------------------- AVX-VNNI, and a stand-in for its instruction in C
   R rows by N half lines, in 16 registers of 8 lanes, one for each column; quads are quad_stride bytes apart. */
#define TILE_PARAMETERS const int R, const int N, int32_t *restrict sums, const uint8_t *restrict panel, \
    ptrdiff_t quad_stride, const int8_t *restrict a, ptrdiff_t stride, ptrdiff_t quads
/* The body of a tile that computes the sums of R rows and N half lines over all quads. */
#define TILE_BY_LANES \
    LANES acc[6][8]; \
    for (int r = 0; r < R; r++) \
        for (int v = 0; v < N; v++) \
            acc[r][v] = ALL_LANES(0); \
    for (ptrdiff_t q = 0; q < quads; q++) \
        for (int r = 0; r < R; r++) { \
            const LANES x = ALL_LANES(four_bytes_at(a + r * stride + 4 * q)); \
            for (int v = 0; v < N; v++) { \
                const LANES w = LOAD_LANES(panel + q * quad_stride + 32 * v); \
                acc[r][v] = ADD_PRODUCTS(acc[r][v], w, x); \
            } \
        } \
    for (int r = 0; r < R; r++) \
        for (int v = 0; v < N; v++) \
            STORE_LANES(sums + r * ROW_SUMS + 8 * v, acc[r][v]);
/* The body of a function that computes sums by tiles of 6 rows by a line, 3 by two lines and 1 by all four. */
#define SUMS_BY_LANES(TILE) \
    const ptrdiff_t quad_stride = lines * LINE_BYTES; \
    ptrdiff_t g; \
    for (; rows >= 6; rows -= 6, sums += 6 * ROW_SUMS, a += 6 * stride) \
        for (g = 0; g < lines; g++) \
            TILE(6, 2, sums + g * LINE, panel + g * LINE_BYTES, quad_stride, a, stride, quads); \
    for (; rows >= 3; rows -= 3, sums += 3 * ROW_SUMS, a += 3 * stride) { \
        for (g = 0; g + 2 <= lines; g += 2) \
            TILE(3, 4, sums + g * LINE, panel + g * LINE_BYTES, quad_stride, a, stride, quads); \
        if (g < lines) \
            TILE(3, 2, sums + g * LINE, panel + g * LINE_BYTES, quad_stride, a, stride, quads); \
    } \
    for (; rows > 0; rows--, sums += ROW_SUMS, a += stride) { \
        if (lines == 4) { \
            TILE(1, 8, sums, panel, quad_stride, a, stride, quads); \
            continue; \
        } \
        for (g = 0; g < lines; g++) \
            TILE(1, 2, sums + g * LINE, panel + g * LINE_BYTES, quad_stride, a, stride, quads); \
    }

/* Return the 4 codes of a quad as one number. */
static inline int32_t four_bytes_at(const int8_t *a) { int32_t x; memcpy(&x, a, 4); return x; }
typedef struct { int32_t lane[8]; } Lanes;
static Lanes all_lanes(int32_t x) { return (Lanes) {{x, x, x, x, x, x, x, x}}; }
static Lanes load_lanes(const void *memory) { Lanes lanes; memcpy(&lanes, memory, sizeof lanes); return lanes; }
/* vpdpbusd: in each lane four bytes without a sign times four signed ones; the sum wraps. */
static Lanes add_products(Lanes sums, Lanes weights, Lanes codes) {
    const uint8_t *w = (const uint8_t *) &weights;
    const int8_t *x = (const int8_t *) &codes;
    for (int k = 0; k < 32; k++)
        sums.lane[k / 4] = (int32_t) ((uint32_t) sums.lane[k / 4] + (uint32_t) (w[k] * x[k]));
    return sums;
}
#define LANES Lanes
#define ALL_LANES(x) all_lanes(x)
#define LOAD_LANES(memory) load_lanes(memory)
#define STORE_LANES(memory, lanes) memcpy(memory, &(lanes), sizeof(Lanes))
#define ADD_PRODUCTS(sums_, weights, codes) add_products(sums_, weights, codes)
static void tile_lanes_in_c(TILE_PARAMETERS) { TILE_BY_LANES }
static void sums_by_lanes_in_c(SUMS_PARAMETERS) { SUMS_BY_LANES(tile_lanes_in_c) }
static void product_lanes_in_c(PRODUCT_PARAMETERS) { ADD_SUMS_OF(sums_by_lanes_in_c, 0) }
#undef LANES
#undef ALL_LANES
#undef LOAD_LANES
#undef STORE_LANES
#undef ADD_PRODUCTS

#if X86
#define ALWAYS_INLINE_FOR(TARGET) static inline __attribute__((always_inline, target(TARGET)))

/* -------------------------------------------------------------- AVX2 and SSE2: products of 16 bits, by pmaddwd
   A quad is two pairs of 16 bits, its codes of even k and of odd k.  The weights of these pairs are codes & 0xff and
   codes >> 8 of what the panel has; wide codes of rows have one pair behind the other.  A tile is R rows by N vectors
   of sums, one sum for each column, in 16 registers.  Sums go from registers to z. */
#define KEEP_IN_REGISTER(vector) __asm__("" : "+v"(vector))  /* makes gcc keep it in one register */
enum { TILE_ROWS = 6 };

/* For both instruction sets: OP(add_ps) is _mm256_add_ps or _mm_add_ps, ALL(and) is _mm256_and_si256 and so on. */
#define FOR_TILE for (int r = 0; r < R; r++) for (int v = 0; v < N; v++)
/* Add the products of one pair of each quad; WEIGHTS makes 16 bits of `codes`. */
#define ADD_PAIRS(NAME, PAIR, WEIGHTS) \
    for (int v = 0; v < N; v++) { \
        const VECTOR codes = ALL(loadu)((const VECTOR *) panel + v); \
        w[v] = WEIGHTS; \
        KEEP_IN_REGISTER(w[v]); \
    } \
    for (int r = 0; r < R; r++) { \
        const int8_t *row = r < 3 ? a + r * stride : row_3 + (r - 3) * stride; \
        const VECTOR x = OP(set1_epi32)(four_bytes_at(row + 4 * PAIR)); \
        for (int v = 0; v < N; v++) \
            sums[r][v] = NAME##_add_pairs(sums[r][v], w[v], x); \
    }
/* A tile of R rows by N vectors, which adds its scaled sums to z, and what it consists of. */
#define TILE_OF_PAIRS(NAME, TARGET) \
    ALWAYS_INLINE_FOR(TARGET) VECTOR NAME##_add_pairs(VECTOR sums, VECTOR w, VECTOR x) { \
        const VECTOR products = OP(madd_epi16)(w, x); \
        __asm__(ADD_TO : "+x"(sums) : "x"(products)); \
        return sums; \
    } \
    ALWAYS_INLINE_FOR(TARGET) void NAME##_add_scaled(float *z, const Head *head, const float *scales, FLOATS value) { \
        const FLOATS scale = OP(mul_ps)(OP(set1_ps)(head->scale), OP(loadu_ps)(scales)); \
        OP(storeu_ps)(z, OP(add_ps)(OP(loadu_ps)(z), OP(mul_ps)(scale, value))); \
    } \
    ALWAYS_INLINE_FOR(TARGET) void NAME##_tile( \
        const int R, const int N, float *restrict z, const float *restrict scales, const uint8_t *restrict panel, \
        ptrdiff_t quad_stride, const char *restrict heads, ptrdiff_t head_stride, const int8_t *restrict a, \
        ptrdiff_t stride, ptrdiff_t quads, ptrdiff_t distance \
    ) { \
        const int8_t *row_3 = a + 3 * stride; \
        const VECTOR low_bytes = OP(set1_epi16)(0xff); \
        VECTOR sums[TILE_ROWS][4], w[4]; \
        FOR_TILE { \
            sums[r][v] = OP(set1_epi32)(head_of(heads, head_stride, r)->correction); \
            KEEP_IN_REGISTER(sums[r][v]); \
        } \
        for (const int8_t *end = a + 8 * quads; a != end;) { \
            for (size_t line = 0; line < N * sizeof(VECTOR); line += LINE_BYTES) \
                _mm_prefetch((const char *) panel + distance + line, _MM_HINT_T1); \
            ADD_PAIRS(NAME, 0, ALL(and)(codes, low_bytes)) \
            __asm__("" : "+r"(panel));  /* so that codes are loaded again: no register is left for them */ \
            ADD_PAIRS(NAME, 1, OP(srli_epi16)(codes, 8)) \
            panel += quad_stride; \
            a += 8; \
            row_3 += 8; \
        } \
        FOR_TILE KEEP_IN_REGISTER(sums[r][v]); \
        FOR_TILE NAME##_add_scaled( \
            z + r * ROW_SUMS + v * LANES, head_of(heads, head_stride, r), scales + v * LANES, \
            OP(cvtepi32_ps)(sums[r][v])); \
    }
#define VECTORS_OF_PAIRS(NAME, R, N) \
    NAME##_tile( \
        R, N, z + v * LANES, scales + v * LANES, panel + v * sizeof(VECTOR), lines * LINE_BYTES, heads, head_stride, \
        a, stride, quads, distance);
#define ROWS_OF_PAIRS(NAME, TARGET, R, N)  /* vectors of columns that do not exist have scales of 0 */ \
    static __attribute__((noinline, target(TARGET))) void NAME##_##R##_rows(PRODUCT_PARAMETERS) { \
        const ptrdiff_t vectors = lines * (LINE / LANES); \
        (void) rows; \
        for (ptrdiff_t v = 0, n; v < vectors; v += n) { \
            for (n = 0; n < N && v + n < vectors && scales[(v + n) * LANES] != 0; n++) {} \
            if (n == N) \
                VECTORS_OF_PAIRS(NAME, R, N) \
            else if (N > 2 && n > 1) { \
                n = 2; \
                VECTORS_OF_PAIRS(NAME, R, 2) \
            } else if (n > 0) { \
                n = 1; \
                VECTORS_OF_PAIRS(NAME, R, 1) \
            } else \
                n = 1; \
        } \
    }
/* A product of any number of rows by tiles of 1 to 6 rows. */
#define PRODUCT_OF_PAIRS(NAME, TARGET) \
    TILE_OF_PAIRS(NAME, TARGET) \
    ROWS_OF_PAIRS(NAME, TARGET, 6, 2) \
    ROWS_OF_PAIRS(NAME, TARGET, 5, 2) \
    ROWS_OF_PAIRS(NAME, TARGET, 4, 2) \
    ROWS_OF_PAIRS(NAME, TARGET, 3, 2) \
    ROWS_OF_PAIRS(NAME, TARGET, 2, 4) \
    ROWS_OF_PAIRS(NAME, TARGET, 1, 4) \
    static __attribute__((target(TARGET))) void product_##NAME(PRODUCT_PARAMETERS) { \
        static const Product tiles[] = { \
            NAME##_1_rows, NAME##_2_rows, NAME##_3_rows, NAME##_4_rows, NAME##_5_rows, NAME##_6_rows, \
        }; \
        for (ptrdiff_t m; rows > 0; rows -= m, z += m * ROW_SUMS, a += m * stride, heads += m * head_stride) { \
            m = rows_of_tile(rows); \
            tiles[m - 1](z, scales, panel, lines, heads, head_stride, a, stride, m, quads, distance); \
            distance = 0; \
        } \
    }
/* Return how many of the remaining rows the next tile takes, so that no tile of one or two rows is left over. */
ALWAYS_INLINE ptrdiff_t rows_of_tile(ptrdiff_t rows) {
    return rows > 11 ? 6 : rows > 6 ? (rows + 1) / 2 : rows;
}

#define VECTOR __m256i
#define FLOATS __m256
#define LANES 8
#define OP(name) _mm256_##name
#define ALL(name) _mm256_##name##_si256
#define ADD_TO "vpaddd %1, %0, %0"  /* with an intrinsic, gcc copies sums between registers */
PRODUCT_OF_PAIRS(avx2, "avx2")
#undef ADD_TO
#undef VECTOR
#undef FLOATS
#undef LANES
#undef OP
#undef ALL

#define VECTOR __m128i
#define FLOATS __m128
#define LANES 4
#define OP(name) _mm_##name
#define ALL(name) _mm_##name##_si128
#define ADD_TO "paddd %1, %0"
PRODUCT_OF_PAIRS(sse2, "sse2")
#undef ADD_TO
#undef VECTOR
#undef FLOATS
#undef LANES
#undef OP
#undef ALL
#undef FOR_TILE

/* ------------------------------------------------------------------- AVX-VNNI, whose tile stands above in macros */
#define VNNI256 "avx2,avxvnni"
#define LANES __m256i
#define ALL_LANES(x) _mm256_set1_epi32(x)
#define LOAD_LANES(memory) _mm256_loadu_si256((const __m256i *) (memory))
#define STORE_LANES(memory, lanes) _mm256_storeu_si256((__m256i *) (memory), lanes)
#define ADD_PRODUCTS(sums_, weights, codes) _mm256_dpbusd_avx_epi32(sums_, weights, codes)
ALWAYS_INLINE_FOR(VNNI256) void tile_vnni256(TILE_PARAMETERS) { TILE_BY_LANES }
ALWAYS_INLINE_FOR(VNNI256) void sums_vnni256(SUMS_PARAMETERS) { SUMS_BY_LANES(tile_vnni256) }
static __attribute__((target(VNNI256))) void product_vnni256(PRODUCT_PARAMETERS) { ADD_SUMS_OF(sums_vnni256, 0) }

/* AVX-512 VNNI: tiles of R rows by N lines, whose sums never leave registers.  A line of one or two rows has several
   chains of sums, which are added at the end. */
#define VNNI512 "avx512f,avx512bw,avx512vl,avx512vnni"
ALWAYS_INLINE_FOR(VNNI512) void tile_vnni512(
    const int R, const int N, const int CHAINS, float *restrict z, const float *restrict scales,
    const uint8_t *restrict panel, const char *restrict heads, ptrdiff_t head_stride, const int8_t *restrict a,
    ptrdiff_t stride, ptrdiff_t quads, ptrdiff_t distance
) {
    __m512i acc[6][4], w[4];
    ptrdiff_t q = 0;
    const int8_t *row_3 = a + 3 * stride;  /* from which rows 3 to 5 are addressed, as rows 0 to 2 are from a */
    for (int r = 0; r < R; r++)
        for (int c = 0; c < CHAINS; c++)
            for (int g = 0; g < N; g++) {
                acc[r * CHAINS + c][g] = _mm512_set1_epi32(c == 0 ? head_of(heads, head_stride, r)->correction : 0);
                KEEP_IN_REGISTER(acc[r * CHAINS + c][g]);
            }
    for (; q + CHAINS <= quads; q += CHAINS)
        for (int c = 0; c < CHAINS; c++) {
            for (int g = 0; g < N; g++) {
                const uint8_t *line = panel + ((q + c) * N + g) * LINE_BYTES;
                if (R > 2)  /* fewer rows only read, which prefetching slows down */
                    _mm_prefetch((const char *) line + distance, _MM_HINT_T1);
                w[g] = _mm512_loadu_si512(line);
            }
            for (int r = 0; r < R; r++) {
                const int8_t *row = r < 3 ? a + r * stride : row_3 + (r - 3) * stride;
                const __m512i x = _mm512_set1_epi32(four_bytes_at(row + 4 * (q + c)));
                for (int g = 0; g < N; g++)
                    acc[r * CHAINS + c][g] = _mm512_dpbusd_epi32(acc[r * CHAINS + c][g], w[g], x);
            }
        }
    for (; CHAINS > 1 && q < quads; q++)
        for (int g = 0; g < N; g++) {
            w[g] = _mm512_loadu_si512(panel + (q * N + g) * LINE_BYTES);
            for (int r = 0; r < R; r++)
                acc[r * CHAINS][g] = _mm512_dpbusd_epi32(
                    acc[r * CHAINS][g], w[g], _mm512_set1_epi32(four_bytes_at(a + r * stride + 4 * q)));
        }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < N; g++) {
            KEEP_IN_REGISTER(acc[r * CHAINS][g]);
            for (int c = 1; c < CHAINS; c++) {
                KEEP_IN_REGISTER(acc[r * CHAINS + c][g]);
                acc[r * CHAINS][g] = _mm512_add_epi32(acc[r * CHAINS][g], acc[r * CHAINS + c][g]);
            }
        }
    for (int r = 0; r < R; r++, z += ROW_SUMS) {
        const __m512 scale = _mm512_set1_ps(head_of(heads, head_stride, r)->scale);
        for (int g = 0; g < N; g++) {
            const __m512 scales_of_line = _mm512_mul_ps(scale, _mm512_loadu_ps(scales + g * LINE));
            const __m512 value = _mm512_mul_ps(scales_of_line, _mm512_cvtepi32_ps(acc[r * CHAINS][g]));
            _mm512_storeu_ps(z + g * LINE, _mm512_add_ps(_mm512_loadu_ps(z + g * LINE), value));
        }
    }
}
/* The tiles that a number of rows takes, for N lines. */
#define TILE_VNNI512(R, N, CHAINS) \
    case R: tile_vnni512(R, N, CHAINS, z, scales, panel, heads, head_stride, a, stride, quads, distance); break;
#define ROWS_VNNI512(N) \
    for (; rows > 0; rows -= m, z += m * ROW_SUMS, a += m * stride, heads += m * head_stride) { \
        m = rows_of_tile(rows); \
        switch (m) { \
            TILE_VNNI512(6, N, 1) TILE_VNNI512(5, N, 1) TILE_VNNI512(4, N, 1) \
            TILE_VNNI512(3, N, 1) TILE_VNNI512(2, N, 2) TILE_VNNI512(1, N, 3) \
        } \
        distance = 0; \
    }
static __attribute__((target(VNNI512))) void product_vnni512(PRODUCT_PARAMETERS) {
    ptrdiff_t m;
    if (lines == 4) { ROWS_VNNI512(4) }
    else if (lines == 3) { ROWS_VNNI512(3) }
    else if (lines == 2) { ROWS_VNNI512(2) }
    else { ROWS_VNNI512(1) }
}

#define CONFIGURE(config) _tile_loadconfig(config)
#define CLEAR(tile) _tile_zero(tile)
#define LOAD(tile, memory, stride_) _tile_loadd(tile, memory, stride_)
#define STORE(tile, memory, stride_) _tile_stored(tile, memory, stride_)
#define MULTIPLY(sums_, rows_, columns_) _tile_dpbsud(sums_, rows_, columns_)
#define AMX "amx-tile,amx-int8," VNNI512
ALWAYS_INLINE_FOR(AMX) void sums_amx(SUMS_PARAMETERS) { SUMS_BY_TILES }
static __attribute__((target(AMX))) void product_amx(PRODUCT_PARAMETERS) {
    if (rows < 4) {
        product_vnni512(z, scales, panel, lines, heads, head_stride, a, stride, rows, quads, distance);
        return;
    }
    ADD_SUMS_OF(sums_amx, 0)
    _tile_release();
}

/* Return whether the CPU has AMX and the system allows it. */
static int has_amx(void) {
    #if defined(__linux__)
    enum { REQUEST = 0x1023, TILE_DATA = 18 };  /* arch_prctl's ARCH_REQ_XCOMP_PERM: the system has to allow it */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 25 & 1)
        && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    #else
    return 0;
    #endif
}
static int has_vnni256(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
static int has_vnni512(void) {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl");
}
static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }
#endif
#if ARM
/* Tiles are R rows by N vectors of four columns each.  NEON and SDOT take signed codes of weights, those less 128. */
#define ALWAYS_INLINE_FOR(TARGET) static inline __attribute__((always_inline, target(TARGET)))
#define TILE_ARM(NAME, TARGET) \
    ALWAYS_INLINE_FOR(TARGET) void NAME( \
        const int R, const int N, int32_t *restrict sums, const uint8_t *restrict panel, ptrdiff_t quad_stride, \
        const int8_t *restrict a, ptrdiff_t stride, ptrdiff_t quads)
#define FOR_TILE for (int r = 0; r < R; r++) for (int v = 0; v < N; v++)
/* Load codes of weights without their 128. */
ALWAYS_INLINE int8x16_t signed_codes(const uint8_t *w) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w), vdupq_n_u8(0x80)));
}
/* Load a quad of a row into each quarter of a vector. */
ALWAYS_INLINE int8x16_t broadcast_quad(const int8_t *a) {
    int32_t x;
    memcpy(&x, a, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(x));
}

/* NEON: products of 16 bits, two of which add up to less than 2^15; a column has two sums until the end. */
#define NEON "+simd"
TILE_ARM(tile_neon, NEON) {
    int32x4_t acc[2][4][2];
    ptrdiff_t q = 0;
    FOR_TILE acc[r][v][0] = acc[r][v][1] = vdupq_n_s32(0);
    for (; q + 2 <= quads; q += 2, panel += 2 * quad_stride, a += 8)
        for (int v = 0; v < N; v++) {
            const int8x16_t w = signed_codes(panel + 16 * v), next = signed_codes(panel + quad_stride + 16 * v);
            for (int r = 0; r < R; r++) {
                const int8x16_t x = broadcast_quad(a + r * stride), y = broadcast_quad(a + r * stride + 4);
                const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
                acc[r][v][0] = vpadalq_s16(acc[r][v][0], vmlal_s8(low, vget_low_s8(next), vget_low_s8(y)));
                acc[r][v][1] = vpadalq_s16(acc[r][v][1], vmlal_high_s8(high, next, y));
            }
        }
    if (q < quads)
        FOR_TILE {
            const int8x16_t w = signed_codes(panel + 16 * v), x = broadcast_quad(a + r * stride);
            acc[r][v][0] = vpadalq_s16(acc[r][v][0], vmull_s8(vget_low_s8(w), vget_low_s8(x)));
            acc[r][v][1] = vpadalq_s16(acc[r][v][1], vmull_high_s8(w, x));
        }
    FOR_TILE vst1q_s32(sums + r * ROW_SUMS + 4 * v, vpaddq_s32(acc[r][v][0], acc[r][v][1]));
}

/* SDOT, or with I8MM USDOT, which takes codes of weights as they are; a register has four quads of a row. */
#if defined(__clang__)
#define SDOT "+dotprod"
#define I8MM "+dotprod+i8mm"
#else
#define SDOT "arch=armv8.2-a+dotprod"
#define I8MM "arch=armv8.2-a+dotprod+i8mm"
#endif
/* Add the products of quad K of those that are loaded. */
#define DOT_QUAD(K, WEIGHTS, MULTIPLY) \
    for (int v = 0; v < N; v++) \
        w[v] = WEIGHTS(panel + K * quad_stride + 16 * v); \
    FOR_TILE acc[r][v] = MULTIPLY(acc[r][v], w[v], x[r], K);
/* The body of a tile; WEIGHT is the type of a vector of weights, WEIGHTS loads one. */
#define DOT_TILE(WEIGHT, WEIGHTS, MULTIPLY) \
    int32x4_t acc[8][16]; \
    int8x16_t x[8]; \
    WEIGHT w[16]; \
    ptrdiff_t q = 0; \
    FOR_TILE acc[r][v] = vdupq_n_s32(0); \
    for (; q + 4 <= quads; q += 4, panel += 4 * quad_stride, a += 16) { \
        for (int r = 0; r < R; r++) \
            x[r] = vld1q_s8(a + r * stride); \
        DOT_QUAD(0, WEIGHTS, MULTIPLY) DOT_QUAD(1, WEIGHTS, MULTIPLY) \
        DOT_QUAD(2, WEIGHTS, MULTIPLY) DOT_QUAD(3, WEIGHTS, MULTIPLY) \
    } \
    for (; q < quads; q++, panel += quad_stride, a += 4) { \
        for (int r = 0; r < R; r++) \
            x[r] = broadcast_quad(a + r * stride); \
        DOT_QUAD(0, WEIGHTS, MULTIPLY) \
    } \
    FOR_TILE vst1q_s32(sums + r * ROW_SUMS + 4 * v, acc[r][v]);
TILE_ARM(tile_sdot, SDOT) { DOT_TILE(int8x16_t, signed_codes, vdotq_laneq_s32) }
TILE_ARM(tile_usdot, I8MM) { DOT_TILE(uint8x16_t, vld1q_u8, vusdotq_laneq_s32) }

/* USMMLA multiplies two quads of a pair of rows with those of two columns. */
TILE_ARM(tile_usmmla, I8MM) {
    int32x4_t acc[4][4];
    for (int r = 0; r < R; r += 2)
        for (int v = 0; v < 2 * N; v++)
            acc[r / 2][v] = vdupq_n_s32(0);
    for (ptrdiff_t q = 0; q < quads; q += 2, panel += 2 * quad_stride, a += 8) {
        uint8x16_t w[4];
        for (int v = 0; v < N; v++) {
            /* Behind the last quad there are codes of 0 in the rows, and in the panel nothing that may be read. */
            const uint8_t *next = panel + (q + 1 < quads ? quad_stride : 0) + 16 * v;
            const uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(panel + 16 * v));
            const uint32x4_t last = vreinterpretq_u32_u8(vld1q_u8(next));
            w[2 * v] = vreinterpretq_u8_u32(vzip1q_u32(first, last));
            w[2 * v + 1] = vreinterpretq_u8_u32(vzip2q_u32(first, last));
        }
        for (int r = 0; r < R; r += 2) {
            const int8x16_t x = vcombine_s8(vld1_s8(a + r * stride), vld1_s8(a + (r + 1) * stride));
            for (int v = 0; v < 2 * N; v++)
                acc[r / 2][v] = vusmmlaq_s32(acc[r / 2][v], w[v], x);
        }
    }
    for (int r = 0; r < R; r += 2)
        for (int v = 0; v < N; v++) {
            const int32x4_t first = acc[r / 2][2 * v], last = acc[r / 2][2 * v + 1];
            vst1q_s32(sums + r * ROW_SUMS + 4 * v, vuzp1q_s32(first, last));
            vst1q_s32(sums + (r + 1) * ROW_SUMS + 4 * v, vuzp2q_s32(first, last));
        }
}

/* Compute the sums of as many rows as tiles of R rows by N vectors take, and of vectors that are left over by 4. */
#define TILES_ARM(TILE, R, N) \
    for (; rows >= R; rows -= R, sums += R * ROW_SUMS, a += R * stride) { \
        ptrdiff_t v = 0; \
        for (; v + N <= 4 * lines; v += N) \
            TILE(R, N, sums + 4 * v, panel + 16 * v, lines * LINE_BYTES, a, stride, quads); \
        for (; N > 4 && v < 4 * lines; v += 4) \
            TILE(R, 4, sums + 4 * v, panel + 16 * v, lines * LINE_BYTES, a, stride, quads); \
    }
ALWAYS_INLINE_FOR(NEON) void sums_neon(SUMS_PARAMETERS) { TILES_ARM(tile_neon, 2, 4) TILES_ARM(tile_neon, 1, 4) }
ALWAYS_INLINE_FOR(SDOT) void sums_sdot(SUMS_PARAMETERS) {
    TILES_ARM(tile_sdot, 8, 2) TILES_ARM(tile_sdot, 4, 4) TILES_ARM(tile_sdot, 2, 8) TILES_ARM(tile_sdot, 1, 16)
}
ALWAYS_INLINE_FOR(I8MM) void sums_i8mm(SUMS_PARAMETERS) {
    TILES_ARM(tile_usmmla, 8, 2) TILES_ARM(tile_usdot, 4, 4)
    TILES_ARM(tile_usdot, 2, 8) TILES_ARM(tile_usdot, 1, 16)
}
static __attribute__((target(NEON))) void product_neon(PRODUCT_PARAMETERS) { ADD_SUMS_OF(sums_neon, 1) }
static __attribute__((target(SDOT))) void product_sdot(PRODUCT_PARAMETERS) { ADD_SUMS_OF(sums_sdot, 1) }
static __attribute__((target(I8MM))) void product_i8mm(PRODUCT_PARAMETERS) { ADD_SUMS_OF(sums_i8mm, 0) }

#if defined(__linux__)
static int has_sdot(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
static int has_i8mm(void) { return has_sdot() && getauxval(AT_HWCAP2) >> 13 & 1; }
#elif defined(__APPLE__)
static int has(const char *feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, NULL, 0) == 0 && value;
}
static int has_sdot(void) { return has("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has_sdot() && has("hw.optional.arm.FEAT_I8MM"); }
#else
static int has_sdot(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif
#endif
static int is_always_supported(void) { return 1; }

typedef struct {
    const char *name;
    Product product;
    int (*is_supported)(void);
    int reads_wide_codes;
} InstructionSet;
static const InstructionSet instruction_sets[] = {  /* the best first; what comes after "c" is for tests alone */
    #if X86
    {"amx", product_amx, has_amx, 0},
    {"avx512_vnni", product_vnni512, has_vnni512, 0},
    {"avx_vnni", product_vnni256, has_vnni256, 0},
    {"avx2", product_avx2, has_avx2, 1},
    {"sse2", product_sse2, is_always_supported, 1},
    #endif
    #if ARM
    {"i8mm", product_i8mm, has_i8mm, 0},
    {"sdot", product_sdot, has_sdot, 0},
    {"neon", product_neon, is_always_supported, 0},
    #endif
    {"c", product_c, is_always_supported, 0},
    {"amx in c", product_tiles_in_c, is_always_supported, 0},
    {"avx_vnni in c", product_lanes_in_c, is_always_supported, 0},
};
enum { INSTRUCTION_SETS = sizeof instruction_sets / sizeof instruction_sets[0] };
static void select_best(void);
static ProductInUse product_in_use = {NULL, 0, select_best};
/* Use an instruction set from now on. */
static void use_instructions(const InstructionSet *set) {
    product_in_use.reads_wide_codes = set->reads_wide_codes;
    __atomic_store_n(&product_in_use.add, set->product, __ATOMIC_RELEASE);
}
/* Use the best instruction set that this CPU has and the system allows. */
static void select_best(void) {
    int set = 0;
    while (!instruction_sets[set].is_supported())
        set++;
    use_instructions(instruction_sets + set);
}
/* Return the name of the instruction set in use, after selecting one if need be. */
static const char *instructions_in_use(void) {
    if (product_in_use.add == NULL)
        select_best();
    for (int set = 0;; set++)
        if (instruction_sets[set].product == product_in_use.add)
            return instruction_sets[set].name;
}
