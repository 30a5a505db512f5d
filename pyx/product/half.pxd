"""IEEE half precision (float16) as storage: to float exactly, from float rounded to the nearest, ties to even.

Single numbers are converted by bit operations, so that loops over them become vector instructions at every CPU level.
Whole lines are converted by the instructions that v3, v4 and aarch64 have for it, without which single steps take up to
twice as long.  Neither depends on how the processor treats subnormals.
"""
from libc.stdint cimport INT32_MIN, int32_t, uint16_t

ctypedef uint16_t half

cdef extern from "product/half.h":
    enum:
        HAS_LINE_CONVERSIONS  # whether the level has instructions for lines of 16 numbers, else these do nothing
    void line_to_float(float *dst, const uint16_t *src) noexcept nogil
    void line_to_half(uint16_t *dst, const float *src) noexcept nogil
    int32_t bits_of_float(float x) noexcept nogil
    float float_of_bits(int32_t i) noexcept nogil


cdef inline float half_to_float(half h) noexcept nogil:
    """Return h as a float."""
    cdef int32_t magnitude = (h & 0x7fff) << 13  # exponent and fraction where float has its lowest five and highest ten
    cdef int32_t subnormal = -(magnitude < (1 << 23))  # masks, because compilers unroll short loops with choices
    cdef int32_t special = -(magnitude >= (31 << 23))
    # The biases differ by 127 - 15 = 112. Infinity and NaN have the highest exponent in both: 31 becomes 255.
    # A subnormal is fraction * 2**-24: with the exponent of 2**-14 it has a leading one too many, which is subtracted.
    cdef int32_t exponent = (112 << 23) + (special & (112 << 23)) + (subnormal & (1 << 23))
    cdef float x = float_of_bits(magnitude + exponent) - float_of_bits(subnormal & (113 << 23))
    return float_of_bits(bits_of_float(x) | (-<int32_t> (h >> 15) & INT32_MIN))


cdef inline half float_to_half(float x) noexcept nogil:
    """Return x rounded to half: infinity from 65520 on, and for a NaN the quiet one of its sign."""
    cdef int32_t bits = bits_of_float(x), magnitude = bits & 0x7fffffff
    # 13 bits of the fraction are dropped: adding just under half of the last place kept, and one more if that is odd,
    # rounds to nearest even.
    cdef int32_t result = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13
    # Below 2**-14 the last place of a half is 2**-24, that of 0.5 in float: the addition rounds.
    cdef int32_t small = bits_of_float(float_of_bits(magnitude) + <float> 0.5) - (126 << 23)
    cdef int32_t special = 0x7e00 if magnitude > (255 << 23) else 0x7c00
    result = small if magnitude < (113 << 23) else result
    result = special if magnitude >= (143 << 23) else result
    return <half> (result | (bits >> 16 & 0x8000))
