// Tiles of whole numbers in 2, 3, 4 or 8 bits, or of floats in 4 (E2M1), as kernels/tiles.py lays them out, to fragments
// of mma.m16n8k16.
//
// Macros: BFLOAT (activations), BITS, GROUP (32, 64, 128: inputs that share a scale), ZERO (the zero point of all
// groups, or -1 where each has its own), SCALE (type of the scales: 0 float16, 1 bfloat16, 2 float32), FLOATS (whether
// codes are floats: then ZERO is 0, or -1 where 16 inputs share a scale in E4M3, which lies in a zero point's place).
//
// A block is 32 outputs x 128 inputs. A lane (g = lane / 4, t = lane % 4) owns 128 of its codes, in 4 units of 32: unit
// 2h + r is the 16 x 64 tile of outputs 16r ... and inputs 64h .... A unit's 16 pairs are registers i = j % 4 of the
// operand A of k-steps s = j / 4: output g + 8 (i % 2), inputs 32 (s / 2) + 8t + 4 (s % 2) + 2 (i / 2) and the next.
// So a lane's activations of two k-steps are 8 neighbours, and 32 inputs end where two k-steps do.
#pragma once
#include "primitives.cuh"

#if BFLOAT
using Number = Bfloat;
#else
using Number = Half;
#endif

#if SCALE == 2
using ScaleBits = uint4;  // of the lane's four outputs g, g + 8, g + 16, g + 24
#else
using ScaleBits = uint2;
#endif

template <bool first, class A, class B> struct Choose { using Type = A; };
template <class A, class B> struct Choose<false, A, B> { using Type = B; };

constexpr int BLOCK_OUTPUTS = 32, BLOCK_INPUTS = 128, BLOCK_GROUPS = BLOCK_INPUTS / GROUP;
constexpr int LANE_WORDS = 4 * BITS;                                                  // codes of a block, in words
constexpr int SCALE_PIECES = BLOCK_GROUPS * BLOCK_OUTPUTS * (SCALE == 2 ? 4 : 2) / 16;  // of 16 bytes
constexpr int ZERO_INPUTS = FLOATS ? 16 : GROUP;  // that share a zero point, or what lies in its place
constexpr int BLOCK_ZEROS = BLOCK_INPUTS / ZERO_INPUTS;
constexpr int ZERO_PIECES = ZERO < 0 ? BLOCK_ZEROS * BLOCK_OUTPUTS / 16 : 0;
constexpr int BLOCK_PIECES = BITS * 32 + SCALE_PIECES + ZERO_PIECES;

// A number of the type with this many bits of mantissa whose last one counts 1: a code put there adds itself.
constexpr int MANTISSA = BFLOAT ? 7 : 10;
constexpr int BIAS = BFLOAT ? 127 : 15;
constexpr unsigned MAGIC = (BIAS + MANTISSA) << MANTISSA;
constexpr unsigned SIGN = 0x8000;

// Fields that are used where they lie, a power of two too large; after these the word is shifted.
constexpr int FIELDS_IN_PLACE = BITS == 8 ? 1 : BITS == 3 ? (BFLOAT ? 2 : 3) : (BFLOAT ? 4 : 8) / BITS;
constexpr int SPAN = FIELDS_IN_PLACE * BITS;

__device__ constexpr unsigned both(unsigned x) { return x << 16 | x; }
__device__ constexpr unsigned power_of_two(int exponent) { return unsigned(exponent + BIAS) << MANTISSA; }
// A whole number below 2^(MANTISSA + 1).
__device__ constexpr unsigned whole(unsigned x) {
    int exponent = MANTISSA;
    while (!(x >> exponent)) exponent--;
    return power_of_two(exponent) + (x << (MANTISSA - exponent)) - (1u << MANTISSA);
}

// Which zero point of a block a lane needs in a part of 32 inputs, of which 8t ... 8t + 7 are its own.
DEVICE int zero_at(int part, int lane) { return FLOATS ? 2 * part + lane % 4 / 2 : part * 32 / GROUP; }

#if FLOATS
// What takes a code that lies in the lowest bits of exponent and the highest of mantissa to its level: a power of two,
// and the small scale of its 16 inputs. These products are exact; with a small scale they are 2^-8 of what they stand
// for, since the power of two times the largest one would be infinite.
struct Offset {
    unsigned lift;
};

// zeros: the small scales of the lane's four outputs, a byte each; `output` 0 ... 3 is one of them.
DEVICE Offset offset_of(unsigned zeros, unsigned output) {
    if (ZERO >= 0) return {both(power_of_two(BIAS - 1))};
    const float small = Half::to_float((zeros >> 8 * output & 127) << 7);  // 2^-8 of it
    return {both(Number::from_float(small * Number::to_float(power_of_two(BIAS - 1))))};
}

// Pair j of a unit, levels times small scales: field j % 4 of halves of word j / 4, its highest bit the sign.
DEVICE unsigned pair_of(const unsigned *words, int j, const Offset &offset) {
    const unsigned word = words[j / 4] << (12 - j % 4 * 4);
    const unsigned field = lop3<0xea>(word >> (13 - MANTISSA), both(7u << (MANTISSA - 1)), word & both(SIGN));
    return Number::fma2(field, offset.lift, both(SIGN));
}
#else
// What takes code + MAGIC's value to code - zero point; one for each place that a field can be used in.
struct Offset {
    unsigned pair[FIELDS_IN_PLACE];
    float single;
};

// zeros: the zero points of the lane's four outputs, a byte each; `output` 0 ... 3 is one of them.
DEVICE Offset offset_of(unsigned zeros, unsigned output) {
    Offset offset;
    const unsigned zero = ZERO < 0 ? zeros >> 8 * output & 255 : unsigned(ZERO);
    offset.single = -bits_float(0x4b000000 | zero);  // 2^23 + zero
    const unsigned first = prmt(zeros, both(MAGIC | SIGN), 0x5050 | output * 0x101);
#pragma unroll
    for (int field = 0; field < FIELDS_IN_PLACE; field++) {
        const unsigned magic = 1u << (MANTISSA - field * BITS);
        if (ZERO >= 0)
            offset.pair[field] = both(SIGN | whole(magic + unsigned(ZERO)));
        else if (field == 0)
            offset.pair[field] = first;
        else
            offset.pair[field] = Number::fma2(first, both(power_of_two(0)), both(whole((1u << MANTISSA) - magic)));
    }
    return offset;
}

#if BITS == 8 && BFLOAT
// Sums of float32, whose upper halves are these numbers exactly.
DEVICE unsigned pair_of(const unsigned *words, int j, const Offset &offset) {
    const unsigned low = j % 2, word = words[j / 2];
    const float first = bits_float(prmt(word, 0x4b000000, 0x7440 + low)) + offset.single;
    const float second = bits_float(prmt(word, 0x4b000000, 0x7442 + low)) + offset.single;
    return prmt(float_bits(first), float_bits(second), 0x7632);
}
#elif BITS == 8
DEVICE unsigned pair_of(const unsigned *words, int j, const Offset &offset) {
    const unsigned field = prmt(words[j / 2], both(MAGIC), j % 2 ? 0x5351 : 0x5250);
    return Number::fma2(field, both(power_of_two(0)), offset.pair[0]);
}
#else
// Pair j of a unit, codes less zero points: field j of halves of its words, from the low bits up. Of 3 bits, five
// fields fill 15, and the sixteenth pair has the bits left over, one in each word.
DEVICE unsigned pair_of(const unsigned *words, int j, const Offset &offset) {
    constexpr int PER_WORD = 16 / BITS;
    constexpr unsigned MASK = (1 << BITS) - 1;
    if (BITS == 3 && j == 15) {
        unsigned field = lop3<0xea>(words[0] >> 15, both(1), both(MAGIC));
        field = lop3<0xea>(words[1] >> 14, both(2), field);
        field = lop3<0xea>(words[BITS == 3 ? 2 : 0] >> 13, both(4), field);
        return Number::fma2(field, both(power_of_two(0)), offset.pair[0]);
    }
    const int bit = j % PER_WORD * BITS, place = bit % SPAN;
    const unsigned field = lop3<0xea>(words[j / PER_WORD] >> (bit - place), both(MASK << place), both(MAGIC));
    return Number::fma2(field, both(power_of_two(-place)), offset.pair[place / BITS]);
}
#endif
#endif

// Scales of a lane's four outputs.
DEVICE void scales_of(uint2 bits, float (&scale)[4]) {
    using Type = typename Choose<SCALE == 1, Bfloat, Half>::Type;
    scale[0] = Type::to_float(bits.x & 0xffff), scale[1] = Type::to_float(bits.x >> 16);
    scale[2] = Type::to_float(bits.y & 0xffff), scale[3] = Type::to_float(bits.y >> 16);
}
DEVICE void scales_of(uint4 bits, float (&scale)[4]) {
    scale[0] = bits_float(bits.x), scale[1] = bits_float(bits.y);
    scale[2] = bits_float(bits.z), scale[3] = bits_float(bits.w);
}
