/* What the CPU can do at most: multiply-adds between registers, and reading memory. Compiled by ceiling.py. */
#include <stddef.h>

#define VECTOR(type) type __attribute__((vector_size(WIDTH), aligned(WIDTH)))
enum { CHAINS = 14 }; /* hide the latency of two units and leave registers for the factors */

#define FMA(name, type)                                                        \
    double name(long rounds)                                                   \
    {                                                                          \
        VECTOR(type) acc[CHAINS], a, b;                                        \
        for (size_t l = 0; l < WIDTH / sizeof(type); l++)                      \
            a[l] = 0.999f, b[l] = 0.001f;                                      \
        for (int k = 0; k < CHAINS; k++)                                       \
            acc[k] = a + (type)k;                                              \
        for (long r = 0; r < rounds; r++) {                                    \
            _Pragma("GCC unroll 14")                                           \
            for (int k = 0; k < CHAINS; k++)                                   \
                acc[k] = acc[k] * a + b;                                       \
        }                                                                      \
        VECTOR(type) sum = acc[0];                                             \
        for (int k = 1; k < CHAINS; k++)                                       \
            sum += acc[k];                                                     \
        return sum[0];                                                         \
    }

FMA(fma_float, float)
FMA(fma_double, double)

double read_all(const float *start, long count, long rounds)
{
    VECTOR(float) acc[8] = {0};
    const size_t lanes = WIDTH / sizeof(float);
    for (long r = 0; r < rounds; r++)
        for (long i = 0; i + (long)(8 * lanes) <= count; i += 8 * lanes)
            for (int k = 0; k < 8; k++)
                acc[k] += *(const VECTOR(float) *)(start + i + k * lanes);
    double sum = 0;
    for (int k = 0; k < 8; k++)
        sum += acc[k][0];
    return sum;
}
