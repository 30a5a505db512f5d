"""Products of rows of codes with panels of codes (integer.pxd), for all instructions that there are for them.

Compiled once, as sums of integers are the same everywhere.  The first product of a process decides which instructions
are used: the best that the CPU has and the system allows.  `use` decides otherwise, for tests.
"""
from cpython.pycapsule cimport PyCapsule_New

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>
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

    /* sums [rows][4 lines of 16] := rows of codes, `stride` bytes apart, times a panel [quads][lines][16][4] */
    #define SUMS int32_t *restrict sums, const uint8_t *restrict panel, ptrdiff_t lines, \\
        const int8_t *restrict a, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t quads
    /* z [rows / parts][4 lines of 16] += the scales of a row and a column times its sum */
    #define ARGUMENTS float *restrict z, const float *restrict scales, const uint8_t *restrict panel, \\
        ptrdiff_t lines, const char *restrict heads, ptrdiff_t apart, const int8_t *restrict a, ptrdiff_t stride, \\
        ptrdiff_t rows, int parts, ptrdiff_t quads
    typedef void (*Product)(ARGUMENTS);
    typedef struct { float scale; int32_t correction; } Head;  /* of each row of codes, `apart` bytes apart */
    enum { LINE = 16, LINE_BYTES = 64, ROW = 4 * LINE };  /* sums of a line, bytes of a line's quad, sums of a row */
    enum { GROUP = 48 };  /* rows of codes whose sums are kept before they go to z */
    #define INLINED_ANYWHERE static inline __attribute__((always_inline))

    INLINED_ANYWHERE const Head *head_of(const char *heads, ptrdiff_t apart, ptrdiff_t r) {
        return (const Head *) (heads + r * apart);
    }

    INLINED_ANYWHERE void add_sums(
        float *restrict z, const int32_t *restrict sums, int parts, const char *restrict heads, ptrdiff_t apart,
        const float *restrict scales
    ) {
        const Head *high = head_of(heads, apart, 0), *low = head_of(heads, apart, parts - 1);
        for (int u = 0; u < LINE; u++) {
            float value = (float) (sums[u] + high->correction);
            if (parts > 1)
                value = 256.0f * value + (float) (sums[ROW + u] + low->correction);
            z[u] += high->scale * scales[u] * value;
        }
    }

    /* A product that first gives sums, as a product that adds to z. */
    #define THROUGH_SUMS(PRODUCT) \\
        int32_t all[GROUP * ROW]; \\
        for (ptrdiff_t m; rows > 0; rows -= m, a += m * stride, heads += m * apart) { \\
            m = rows < GROUP ? rows : GROUP; \\
            PRODUCT(all, panel, lines, a, stride, m, quads); \\
            for (ptrdiff_t r = 0; r < m; r += parts, z += ROW) \\
                for (ptrdiff_t g = 0; g < lines; g++) \\
                    add_sums( \\
                        z + g * LINE, all + r * ROW + g * LINE, parts, heads + r * apart, apart, scales + g * LINE); \\
        }

    /* ------------------------------------------------------------------------------------------------ any CPU */
    static void sums_c(SUMS) {
        for (ptrdiff_t r = 0; r < rows; r++)
            for (ptrdiff_t g = 0; g < lines; g++) {
                int32_t acc[LINE] = {0};
                for (ptrdiff_t q = 0; q < quads; q++) {
                    const uint8_t *w = panel + (q * lines + g) * LINE_BYTES;
                    const int8_t *x = a + r * stride + 4 * q;
                    for (int u = 0; u < LINE; u++)
                        acc[u] += w[4 * u] * x[0] + w[4 * u + 1] * x[1] + w[4 * u + 2] * x[2] + w[4 * u + 3] * x[3];
                }
                memcpy(sums + r * ROW + g * LINE, acc, sizeof acc);
            }
    }
    static void product_c(ARGUMENTS) { THROUGH_SUMS(sums_c) }

    /* ------------------------------------------------------------ AMX, and stand-ins for its instructions in C
       Tiles 0 to 3 are the sums of up to 16 rows and a line each; 4 has codes of the rows, 5 to 7 those of a line, 16
       quads each.  Behind the last quads there are codes of 0 in the rows, and in the panel anything. */
    typedef struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } TileShapes;

    static inline void shape_tiles(TileShapes *shapes, ptrdiff_t rows) {
        memset(shapes, 0, sizeof *shapes);
        shapes->palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            shapes->bytes[tile] = 64;
            shapes->rows[tile] = tile < 5 ? (uint8_t) rows : 16;
        }
    }

    #define LINE_OF_TILES(G, B) \\
        if (lines > G) { LOAD(B, line + G * LINE_BYTES, lines * LINE_BYTES); MULTIPLY(G, 4, B); }
    #define SUMS_BY_TILES \\
        TileShapes shapes; \\
        ptrdiff_t shaped = 0, m; \\
        for (; rows > 0; rows -= m, sums += m * ROW, a += m * stride) { \\
            m = rows < 16 ? rows : 16; \\
            if (m != shaped) { shape_tiles(&shapes, m); SHAPE(&shapes); shaped = m; } \\
            CLEAR(0); CLEAR(1); CLEAR(2); CLEAR(3); \\
            for (ptrdiff_t q = 0; q < quads; q += 16) { \\
                const uint8_t *line = panel + q * lines * LINE_BYTES; \\
                LOAD(4, a + 4 * q, stride); \\
                LINE_OF_TILES(0, 5) LINE_OF_TILES(1, 6) LINE_OF_TILES(2, 7) LINE_OF_TILES(3, 5) \\
            } \\
            STORE(0, sums, 4 * ROW); \\
            if (lines > 1) STORE(1, sums + LINE, 4 * ROW); \\
            if (lines > 2) STORE(2, sums + 2 * LINE, 4 * ROW); \\
            if (lines > 3) STORE(3, sums + 3 * LINE, 4 * ROW); \\
        }

    typedef struct { TileShapes shapes; uint8_t data[8][16][64]; } Tiles;
    static void copy_tile(Tiles *tiles, int tile, char *memory, ptrdiff_t stride, int store) {
        for (int r = 0; r < tiles->shapes.rows[tile]; r++) {
            if (store)
                memcpy(memory + r * stride, tiles->data[tile][r], tiles->shapes.bytes[tile]);
            else
                memcpy(tiles->data[tile][r], memory + r * stride, tiles->shapes.bytes[tile]);
        }
    }
    static void multiply_tiles(Tiles *tiles, int sums, int signed_rows, int unsigned_columns) {
        for (int r = 0; r < tiles->shapes.rows[sums]; r++)
            for (int u = 0; u < LINE; u++) {
                int32_t total;
                memcpy(&total, tiles->data[sums][r] + 4 * u, 4);
                for (int k = 0; k < tiles->shapes.bytes[signed_rows]; k++)
                    total += (int8_t) tiles->data[signed_rows][r][k]
                        * tiles->data[unsigned_columns][k / 4][4 * u + k % 4];
                memcpy(tiles->data[sums][r] + 4 * u, &total, 4);
            }
    }
    #define SHAPE(shapes_) memcpy(&tiles.shapes, shapes_, sizeof tiles.shapes)
    #define CLEAR(tile) memset(tiles.data[tile], 0, sizeof tiles.data[tile])
    #define LOAD(tile, memory, stride_) copy_tile(&tiles, tile, (char *) (memory), stride_, 0)
    #define STORE(tile, memory, stride_) copy_tile(&tiles, tile, (char *) (memory), stride_, 1)
    #define MULTIPLY(sums_, rows_, columns_) multiply_tiles(&tiles, sums_, rows_, columns_)
    static void sums_by_tiles_in_c(SUMS) { Tiles tiles; SUMS_BY_TILES }
    static void product_tiles_in_c(ARGUMENTS) { THROUGH_SUMS(sums_by_tiles_in_c) }
    #undef SHAPE
    #undef CLEAR
    #undef LOAD
    #undef STORE
    #undef MULTIPLY

    #if X86
    static inline int32_t quad_at(const int8_t *a) { int32_t x; memcpy(&x, a, 4); return x; }
    #define INLINED(TARGET) static inline __attribute__((always_inline, target(TARGET)))

    /* --------------------------------------------- AVX2: products of 16 bits, two sums for each unit until the end */
    #define AVX2 "avx2"
    INLINED(AVX2) void tile_avx2(const int R, int32_t *restrict sums, const uint8_t *restrict panel, ptrdiff_t step,
                                 const int8_t *restrict a, ptrdiff_t stride, ptrdiff_t quads) {
        __m256i acc[2][4], w[4];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++)
                acc[r][v] = _mm256_setzero_si256();
        for (ptrdiff_t q = 0; q < quads; q++) {
            for (int v = 0; v < 4; v++)
                w[v] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *) (panel + q * step + 16 * v)));
            for (int r = 0; r < R; r++) {
                const __m128i four = _mm_cvtepi8_epi16(_mm_cvtsi32_si128(quad_at(a + r * stride + 4 * q)));
                const __m256i x = _mm256_broadcastq_epi64(four);
                for (int v = 0; v < 4; v++)
                    acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(w[v], x));
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v += 2) {  /* the sums of pairs come out in the order 0 1 4 5 2 3 6 7 */
                const __m256i both = _mm256_hadd_epi32(acc[r][v], acc[r][v + 1]);
                _mm256_storeu_si256((__m256i *) (sums + r * ROW + 4 * v), _mm256_permute4x64_epi64(both, 0xd8));
            }
    }
    INLINED(AVX2) void sums_avx2(SUMS) {
        for (; rows > 1; rows -= 2, sums += 2 * ROW, a += 2 * stride)
            for (ptrdiff_t g = 0; g < lines; g++)
                tile_avx2(2, sums + g * LINE, panel + g * LINE_BYTES, lines * LINE_BYTES, a, stride, quads);
        if (rows)
            for (ptrdiff_t g = 0; g < lines; g++)
                tile_avx2(1, sums + g * LINE, panel + g * LINE_BYTES, lines * LINE_BYTES, a, stride, quads);
    }
    static __attribute__((target(AVX2))) void product_avx2(ARGUMENTS) { THROUGH_SUMS(sums_avx2) }

    /* ------------------------------------------------------------ AVX-VNNI: R rows by N half lines, 16 registers */
    #define VNNI256 "avx2,avxvnni"
    INLINED(VNNI256) void tile_vnni256(const int R, const int N, int32_t *restrict sums, const uint8_t *restrict panel,
                                       ptrdiff_t step, const int8_t *restrict a, ptrdiff_t stride, ptrdiff_t quads) {
        __m256i acc[6][8];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < N; v++)
                acc[r][v] = _mm256_setzero_si256();
        for (ptrdiff_t q = 0; q < quads; q++)
            for (int r = 0; r < R; r++) {
                const __m256i x = _mm256_set1_epi32(quad_at(a + r * stride + 4 * q));
                for (int v = 0; v < N; v++) {
                    const __m256i w = _mm256_loadu_si256((const __m256i *) (panel + q * step + 32 * v));
                    acc[r][v] = _mm256_dpbusd_avx_epi32(acc[r][v], w, x);
                }
            }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < N; v++)
                _mm256_storeu_si256((__m256i *) (sums + r * ROW + 8 * v), acc[r][v]);
    }
    INLINED(VNNI256) void sums_vnni256(SUMS) {
        const ptrdiff_t step = lines * LINE_BYTES;
        ptrdiff_t g;
        for (; rows >= 6; rows -= 6, sums += 6 * ROW, a += 6 * stride)
            for (g = 0; g < lines; g++)
                tile_vnni256(6, 2, sums + g * LINE, panel + g * LINE_BYTES, step, a, stride, quads);
        for (; rows >= 3; rows -= 3, sums += 3 * ROW, a += 3 * stride) {
            for (g = 0; g + 2 <= lines; g += 2)
                tile_vnni256(3, 4, sums + g * LINE, panel + g * LINE_BYTES, step, a, stride, quads);
            if (g < lines)
                tile_vnni256(3, 2, sums + g * LINE, panel + g * LINE_BYTES, step, a, stride, quads);
        }
        for (; rows > 0; rows--, sums += ROW, a += stride) {
            if (lines == 4) {
                tile_vnni256(1, 8, sums, panel, step, a, stride, quads);
                continue;
            }
            for (g = 0; g < lines; g++)
                tile_vnni256(1, 2, sums + g * LINE, panel + g * LINE_BYTES, step, a, stride, quads);
        }
    }
    static __attribute__((target(VNNI256))) void product_vnni256(ARGUMENTS) { THROUGH_SUMS(sums_vnni256) }

    /* AVX-512 VNNI: R rows of codes by N lines, of one or two rows several chains of a line; sums never leave
       registers */
    #define KEPT(acc) __asm__("" : "+v"(acc))  /* in one register from one such place to the next */
    #define VNNI512 "avx512f,avx512bw,avx512vl,avx512vnni"
    INLINED(VNNI512) void tile_vnni512(const int R, const int N, const int CHAINS, const int PARTS, float *restrict z,
                                       const float *restrict scales, const uint8_t *restrict panel,
                                       const char *restrict heads, ptrdiff_t apart, const int8_t *restrict a,
                                       ptrdiff_t stride, ptrdiff_t quads) {
        __m512i acc[6][4], w[4];
        ptrdiff_t q = 0;
        const int8_t *lower = a + 3 * stride;
        for (int r = 0; r < R; r++)
            for (int c = 0; c < CHAINS; c++)
                for (int g = 0; g < N; g++) {
                    acc[r * CHAINS + c][g] = _mm512_set1_epi32(c == 0 ? head_of(heads, apart, r)->correction : 0);
                    KEPT(acc[r * CHAINS + c][g]);
                }
        for (; q + CHAINS <= quads; q += CHAINS)
            for (int c = 0; c < CHAINS; c++) {
                for (int g = 0; g < N; g++)
                    w[g] = _mm512_loadu_si512(panel + ((q + c) * N + g) * LINE_BYTES);
                for (int r = 0; r < R; r++) {
                    const int8_t *row = r < 3 ? a + r * stride : lower + (r - 3) * stride;
                    const __m512i x = _mm512_set1_epi32(quad_at(row + 4 * (q + c)));
                    for (int g = 0; g < N; g++)
                        acc[r * CHAINS + c][g] = _mm512_dpbusd_epi32(acc[r * CHAINS + c][g], w[g], x);
                }
            }
        for (; CHAINS > 1 && q < quads; q++)
            for (int g = 0; g < N; g++) {
                w[g] = _mm512_loadu_si512(panel + (q * N + g) * LINE_BYTES);
                for (int r = 0; r < R; r++)
                    acc[r * CHAINS][g] = _mm512_dpbusd_epi32(
                        acc[r * CHAINS][g], w[g], _mm512_set1_epi32(quad_at(a + r * stride + 4 * q)));
            }
        for (int r = 0; r < R; r++)
            for (int g = 0; g < N; g++) {
                KEPT(acc[r * CHAINS][g]);
                for (int c = 1; c < CHAINS; c++) {
                    KEPT(acc[r * CHAINS + c][g]);
                    acc[r * CHAINS][g] = _mm512_add_epi32(acc[r * CHAINS][g], acc[r * CHAINS + c][g]);
                }
            }
        for (int r = 0; r < R; r += PARTS, z += ROW) {
            const __m512 scale = _mm512_set1_ps(head_of(heads, apart, r)->scale), high = _mm512_set1_ps(256);
            for (int g = 0; g < N; g++) {
                __m512 value = _mm512_cvtepi32_ps(acc[r * CHAINS][g]);
                if (PARTS > 1)
                    value = _mm512_add_ps(_mm512_mul_ps(high, value), _mm512_cvtepi32_ps(acc[(r + 1) * CHAINS][g]));
                value = _mm512_mul_ps(_mm512_mul_ps(scale, _mm512_loadu_ps(scales + g * LINE)), value);
                _mm512_storeu_ps(z + g * LINE, _mm512_add_ps(_mm512_loadu_ps(z + g * LINE), value));
            }
        }
    }
    #define TILE_VNNI512(R, N, CHAINS, PARTS) \\
        case R: tile_vnni512(R, N, CHAINS, PARTS, z, scales, panel, heads, apart, a, stride, quads); break;
    #define ROWS_VNNI512(N) \\
        if (parts == 1) \\
            for (; rows > 0; rows -= m, z += m * ROW, a += m * stride, heads += m * apart) { \\
                m = rows > 11 ? 6 : rows > 6 ? (rows + 1) / 2 : rows;  /* no tile of one or two rows is left over */ \\
                switch (m) { \\
                    TILE_VNNI512(6, N, 1, 1) TILE_VNNI512(5, N, 1, 1) TILE_VNNI512(4, N, 1, 1) \\
                    TILE_VNNI512(3, N, 1, 1) TILE_VNNI512(2, N, 2, 1) TILE_VNNI512(1, N, 3, 1) \\
                } \\
            } \\
        else \\
            for (; rows > 0; rows -= m, z += m / 2 * ROW, a += m * stride, heads += m * apart) { \\
                m = rows > 8 ? 6 : rows == 8 ? 4 : rows; \\
                switch (m) { \\
                    TILE_VNNI512(6, N, 1, 2) TILE_VNNI512(4, N, 1, 2) TILE_VNNI512(2, N, 2, 2) \\
                } \\
            }
    static __attribute__((target(VNNI512))) void product_vnni512(ARGUMENTS) {
        ptrdiff_t m;
        if (lines == 4) { ROWS_VNNI512(4) }
        else if (lines == 3) { ROWS_VNNI512(3) }
        else if (lines == 2) { ROWS_VNNI512(2) }
        else { ROWS_VNNI512(1) }
    }

    #define SHAPE(shapes) _tile_loadconfig(shapes)
    #define CLEAR(tile) _tile_zero(tile)
    #define LOAD(tile, memory, stride_) _tile_loadd(tile, memory, stride_)
    #define STORE(tile, memory, stride_) _tile_stored(tile, memory, stride_)
    #define MULTIPLY(sums_, rows_, columns_) _tile_dpbsud(sums_, rows_, columns_)
    #define AMX "amx-tile,amx-int8," VNNI512
    INLINED(AMX) void sums_amx(SUMS) { SUMS_BY_TILES }
    static __attribute__((target(AMX))) void product_amx(ARGUMENTS) {
        if (rows < 4) {
            product_vnni512(z, scales, panel, lines, heads, apart, a, stride, rows, parts, quads);
            return;
        }
        THROUGH_SUMS(sums_amx)
        _tile_release();
    }

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
    static int always(void) { return 1; }

    typedef struct { const char *name; Product product; int (*runs)(void); } Way;
    static const Way ways[] = {  /* the best first; what comes after "c" is for tests alone */
        #if X86
        {"amx", product_amx, has_amx},
        {"avx512_vnni", product_vnni512, has_vnni512},
        {"avx_vnni", product_vnni256, has_vnni256},
        {"avx2", product_avx2, has_avx2},
        #endif
        {"c", product_c, always},
        {"amx in c", product_tiles_in_c, always},
    };
    enum { WAYS = sizeof ways / sizeof ways[0] };
    static void product_first(ARGUMENTS);
    static Product product_in_use = product_first;
    static void use_best(void) {
        int way = 0;
        while (!ways[way].runs())
            way++;
        __atomic_store_n(&product_in_use, ways[way].product, __ATOMIC_RELEASE);
    }
    static void product_first(ARGUMENTS) {
        use_best();
        product_in_use(z, scales, panel, lines, heads, apart, a, stride, rows, parts, quads);
    }
    static const char *way_in_use(void) {
        if (product_in_use == product_first)
            use_best();
        for (int way = 0;; way++)
            if (ways[way].product == product_in_use)
                return ways[way].name;
    }
    """
    ctypedef void (*Product)() noexcept nogil
    ctypedef struct Way:
        const char *name
        Product product
        int (*runs)() noexcept nogil
    const Way *ways
    enum:
        WAYS
    Product product_in_use
    const char *way_in_use()

PRODUCT = PyCapsule_New(&product_in_use, "blockcell._integer.PRODUCT", NULL)  # for the kernels


def available():
    """The names of the instructions that can be used here, the best first; the last ones for tests alone."""
    return tuple([ways[k].name.decode() for k in range(WAYS) if ways[k].runs()])


def in_use():
    return way_in_use().decode()


def use(name):
    """Decide which instructions are used from now on, in all threads."""
    global product_in_use
    for k in range(WAYS):
        if ways[k].name.decode() == name and ways[k].runs():
            product_in_use = ways[k].product
            return
    raise ValueError(f"name is {name!r}; expected one of {', '.join(available())}")
