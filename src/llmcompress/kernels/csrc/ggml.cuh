// Weights in blocks of GGML's types Q4_K, Q5_K, Q6_K and Q8_0, as fragments and scales.
//
// A record holds 16 rows by 256 inputs, as many bytes as the file has for them: codes, further bits of codes, what
// scales are made of. Weights are the operand with 16 rows of mma.m16n8k16: lane 4g + t owns rows g and g + 8, and of
// every 32 inputs ("chunk") eight, at 8t, or 4t and 16 + 4t where groups have 16 inputs; those are the two steps of a
// chunk, each within one group.
//
// BITS: 4, 5, 6 or 8 for Q4_K, Q5_K, Q6_K, Q8_0. BFLOAT: 1 where fragments are bfloat16, 0 for float16.
#ifndef GGML_CUH
#define GGML_CUH

#include "primitives.cuh"

#if BFLOAT
typedef Bfloat Float;
#else
typedef Half Float;
#endif

constexpr bool MINIMA = BITS == 4 || BITS == 5;
constexpr int CODES = BITS == 8 ? 8 : 4;                    // pieces of 16 bytes for each lane
constexpr int FURTHER = BITS == 5 ? 1 : BITS == 6 ? 2 : 0;  // likewise
constexpr int PIECES = (CODES + FURTHER) * 32 + 16 + (BITS == 6 ? 2 : 0);  // of a record

// What a lane has of a record. heads: of rows g and g + 8, Q4_K and Q5_K: d, dmin, multiples and minima as in the file;
// Q6_K: multiples; Q8_0: d of eight blocks. units: d of both rows of Q6_K.
struct Record {
    uint4 codes[CODES];
    uint4 further[FURTHER + 1];
    uint4 heads[2];
    unsigned units;
};

template <bool shared, class T> DEVICE T take(const T *at) { return shared ? load_shared(at) : load(at); }

// A lane's part of a record in shared or in global memory.
template <bool shared> DEVICE Record read_record(const uint4 *at) {
    const int lane = threadIdx.x % 32;
    Record r;
#pragma unroll
    for (int i = 0; i < CODES; ++i) r.codes[i] = take<shared>(at + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < FURTHER; ++i) r.further[i] = take<shared>(at + (CODES + i) * 32 + lane);
    const uint4 *heads = at + (CODES + FURTHER) * 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) r.heads[half] = take<shared>(heads + half * 8 + lane / 4);
    if (BITS == 6) r.units = take<shared>(reinterpret_cast<const unsigned *>(heads + 16) + lane / 4);
    return r;
}

DEVICE unsigned word(const uint4 &of, int i) { return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w; }

// ---- Codes --------------------------------------------------------------------------------------------------------

// Bits with two fields 16 bits apart, moved from bit `from` to bit `to` of each half.
DEVICE unsigned moved(unsigned bits, int from, int to) { return to > from ? bits << (to - from) : bits >> (from - to); }

// `bits` with the fields `mask` of others.
DEVICE unsigned with_fields(unsigned bits, unsigned others, unsigned mask) { return lop3<0xea>(others, mask, bits); }

// Pair i of the eight codes of a row that a lane owns in a chunk, as two 16-bit floats. The codes of Q4_K and Q5_K lie in
// the mantissa of OFFSET: a float is OFFSET + code / 2^BITS.
constexpr int AT = !MINIMA ? 0 : BFLOAT ? 7 - BITS : 4;  // the lowest bit of a code
constexpr int OFFSET = BFLOAT ? 1 : BITS == 4 ? 4 : 2;
DEVICE unsigned pair_with_offset(const Record &record, int chunk, int half, int i) {
    const unsigned low = word(record.codes[chunk / 2], chunk % 2 * 2 + half);
    const unsigned offsets = BFLOAT ? 0x3f803f80u : BITS == 4 ? 0x44004400u : 0x40004000u;
    const unsigned bits = with_fields(offsets, moved(low, 4 * i, AT), 0x000f000fu << AT);
    if (BITS == 4) return bits;
    const int pair = (chunk % 2 * 2 + half) * 4 + i;
    return with_fields(bits, moved(word(record.further[0], chunk / 2), pair, AT + 4), 0x00010001u << (AT + 4));
}

// The same of Q6_K: codes less 32.
DEVICE unsigned pair_of_six_bits(const Record &record, int chunk, int half, int i) {
    const unsigned low = word(record.codes[chunk / 2], chunk % 2 * 2 + half);
    const bool inside = !BFLOAT && i % 2 == 1;  // a field of float16 may stay at bit 4: its mantissa has 10 bits
    const int at = inside ? 4 : 0, pair = half * 4 + i;
    const unsigned magic = BFLOAT ? 0x43004300u : 0x64006400u;  // numbers whose last bit counts 1
    unsigned bits = with_fields(magic, moved(low, 4 * i, at), 0x000f000fu << at);
    bits = with_fields(bits, moved(word(record.further[chunk / 4], chunk % 4), 2 * pair, at + 4), 0x00030003u << (at + 4));
    if (BFLOAT) return Float::fma2(bits, 0x3f803f80u, 0xc320c320u);  // -160
    if (inside) return Float::fma2(bits, 0x2c002c00u, 0xd600d600u);  // -96
    return Float::fma2(bits, 0x3c003c00u, 0xe420e420u);              // -1056
}

// The same of Q8_0, whose words hold inputs 0, 2, 1, 3 of four.
DEVICE unsigned byte_pair(const Record &record, int chunk, int half, int i) {
    const unsigned both = word(record.codes[chunk], half * 2 + i / 2) >> (8 * (i % 2));
    if (!BFLOAT) return Float::fma2(with_fields(0x64006400u, both, 0x00ff00ffu), 0x3c003c00u, 0xe480e480u);  // -1152
    // 128 + the low seven bits, less 256, or less 128 where the top bit is set: exact in bfloat16
    const unsigned low = with_fields(0x43004300u, both, 0x007f007fu);
    return Float::fma2(low, 0x3f803f80u, lop3<0x6a>(both, 0x00800080u, 0xc380c380u));  // (a & b) ^ c
}

DEVICE unsigned pair_of(const Record &record, int chunk, int half, int i) {
    if (MINIMA) return pair_with_offset(record, chunk, half, i);
    return BITS == 8 ? byte_pair(record, chunk, half, i) : pair_of_six_bits(record, chunk, half, i);
}

// What a float of a pair counts in steps of its scale; exact.
DEVICE float level_of(unsigned short code) {
    return MINIMA ? (Float::to_float(code) - OFFSET) * (1 << BITS) : Float::to_float(code);
}

// ---- Scales -------------------------------------------------------------------------------------------------------

// Scales of one row's groups in a record, and what is subtracted.
struct Scales {
    unsigned multiples[4], minima[2];  // bytes; of Q6_K with 128 added, of Q8_0 d itself
    float d, dmin;
};

DEVICE float half_of(unsigned pair, int i) { return Half::to_float((unsigned short)(pair >> (16 * i))); }

DEVICE Scales scales_of(const Record &record, int half) {
    const uint4 head = record.heads[half];
    Scales s;
    if (MINIMA) {  // d, dmin; six bits each of four multiples and four minima, their spare bits and nibbles the others
        s.d = half_of(head.x, 0);
        s.dmin = half_of(head.x, 1);
        s.multiples[0] = head.y & 0x3f3f3f3f;
        s.multiples[1] = (head.w & 0x0f0f0f0f) | (head.y >> 2 & 0x30303030);
        s.minima[0] = head.z & 0x3f3f3f3f;
        s.minima[1] = (head.w >> 4 & 0x0f0f0f0f) | (head.z >> 2 & 0x30303030);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.multiples[i] = word(head, i) ^ (BITS == 6 ? 0x80808080u : 0);
        if (BITS == 6) s.d = half_of(record.units, half);
    }
    return s;
}

// Byte `byte` of a word, less `zero`, times `factor`, a power of two; exact.
DEVICE float byte_of(unsigned word, unsigned byte, float zero = 0.0f, float factor = 1.0f) {
    const unsigned exponent = 0x4b000000u | threadIdx.z;  // a variable, so that the selector is the instruction's constant
    const float biased = bits_float(prmt(word, exponent, 0x7540 | byte));  // 2^23 and the byte
    return fmaf(biased, factor, -(8388608.0f + zero) * factor);
}

// The scale of a step of a chunk in units of the record's d, or, of Q8_0, the scale itself; exact.
DEVICE float multiple_of(const Scales &s, int chunk, int step) {
    if (BITS == 8) return half_of(s.multiples[chunk / 2], chunk % 2);
    const int group = BITS == 6 ? chunk * 2 + step : chunk;
    return byte_of(s.multiples[group / 4], group % 4, BITS == 6 ? 128.0f : 0.0f);
}
DEVICE float unit_of(const Scales &s) { return BITS == 8 ? 1.0f : s.d; }

#endif
