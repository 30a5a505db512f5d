/* Numbers of activations, and pieces of exp and tanh in single instructions. */
#pragma once
#include <stdint.h>
#include <string.h>

#define LOG2_E 1.4426950408889634  /* 1 / ln 2 */
#define SELU_SCALE 1.0507009873554804934
#define SELU_EDGE 1.7580993408473768599  /* its scale times its alpha */

/* What a pointer to a cell points to: a cell with the default activations, or with any. */
typedef void default_activations;
typedef void any_activations;

/* 2^k from the k + bias in the lowest bits of a number */
static inline float exp2_of_low_bits_f(float x) {
    uint32_t i; memcpy(&i, &x, sizeof x); i <<= 23; memcpy(&x, &i, sizeof x); return x;
}
static inline double exp2_of_low_bits_d(double x) {
    uint64_t i; memcpy(&i, &x, sizeof x); i <<= 52; memcpy(&x, &i, sizeof x); return x;
}

/* Where results no longer change: sigmoid from below, from above, tanh.  Not constants, and "used", so that they
   must be read: gcc would work out the results at constant bounds and pick them by masks, up to eight
   instructions in place of a min or max. */
static float bounds_f[3] __attribute__((used)) = {-110.0f, 40.0f, 9.1f};
static double bounds_d[3] __attribute__((used)) = {-760.0, 40.0, 20.0};
/* Where exp(x) - 1 is -1, and where exp is 0 or infinite. */
static float exp_bounds_f[3] __attribute__((used)) = {-18.0f, -105.0f, 89.0f};
static double exp_bounds_d[3] __attribute__((used)) = {-40.0, -746.0, 710.0};
