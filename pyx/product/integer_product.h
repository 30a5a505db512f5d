/* The product with int8 weights, by which `_integer.pyx` serves the kernels. */
#pragma once
#include <stddef.h>
#include <stdint.h>
enum { LINE_BYTES = 64 };  /* of a cache line */
#define ALWAYS_INLINE static inline __attribute__((always_inline))
typedef struct { float scale; int32_t correction; } Head;  /* of a quantized row, or of a piece of one */

/* Parameters of a function that adds to z [rows][4 lines of 16] the scales of its row and its column times each sum.
   scales [lines][16], of columns; heads: those of the rows, head_stride bytes apart; may be those of quantized rows;
   distance: as in tile.pxd, for the first tile of rows; not used by every product */
#define PRODUCT_PARAMETERS float *restrict z, const float *restrict scales, const uint8_t *restrict panel, \
    ptrdiff_t lines, const char *restrict heads, ptrdiff_t head_stride, const int8_t *restrict a, ptrdiff_t stride, \
    ptrdiff_t rows, ptrdiff_t quads, ptrdiff_t distance
typedef void (*Product)(PRODUCT_PARAMETERS);
typedef struct { Product add; int reads_wide_codes; void (*select)(void); } ProductInUse;
