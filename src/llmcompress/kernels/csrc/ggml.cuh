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

constexpr int ZERO = BITS == 6 ? 32 : BITS == 8 ? 128 : 0;  // the code of value zero
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

// Bits of two fields 16 bits apart, moved from bit `from` to bit `to` of each half.
DEVICE unsigned moved(unsigned bits, int from, int to, unsigned mask) {
    return (to > from ? bits << (to - from) : bits >> (from - to)) & (mask << to);
}

// Pair i of the eight codes of a row that a lane owns in a chunk, less the code of zero, as two 16-bit floats.
DEVICE unsigned nibble_pair(const Record &record, int chunk, int half, int i) {
    const unsigned low = word(record.codes[chunk / 2], chunk % 2 * 2 + half);
    const bool inside = !BFLOAT && i % 2 == 1;  // a field of float16 may stay at bit 4: its mantissa has 10 bits
    const int at = inside ? 4 : 0;
    const unsigned magic = BFLOAT ? 0x43004300u : 0x64006400u;  // numbers whose last bit counts 1
    unsigned bits = lop3<0xea>(low >> (4 * i - at), 0x000f000fu << at, magic);
    if (BITS == 5) {
        const int pair = (chunk % 2 * 2 + half) * 4 + i;
        bits |= moved(word(record.further[0], chunk / 2), pair, at + 4, 0x00010001u);
    }
    if (BITS == 6) {
        const int pair = half * 4 + i;
        bits |= moved(word(record.further[chunk / 4], chunk % 4), 2 * pair, at + 4, 0x00030003u);
    }
    if (BFLOAT) return Float::fma2(bits, 0x3f803f80u, ZERO ? 0xc320c320u : 0xc300c300u);  // -160, -128
    if (inside) return Float::fma2(bits, 0x2c002c00u, ZERO ? 0xd600d600u : 0xd400d400u);  // -96, -64
    return Float::fma2(bits, 0x3c003c00u, ZERO ? 0xe420e420u : 0xe400e400u);            // -1056, -1024
}

// The same of Q8_0, whose words hold inputs 0, 2, 1, 3 of four.
DEVICE unsigned byte_pair(const Record &record, int chunk, int half, int i) {
    const unsigned both = word(record.codes[chunk], half * 2 + i / 2) >> (8 * (i % 2));
    if (!BFLOAT) return Float::fma2((both & 0x00ff00ffu) | 0x64006400u, 0x3c003c00u, 0xe480e480u);  // -1152
    // 128 + the low seven bits, less 256, or less 128 where the top bit is set: exact in bfloat16
    return Float::fma2((both & 0x007f007fu) | 0x43004300u, 0x3f803f80u, (both & 0x00800080u) ^ 0xc380c380u);
}

DEVICE unsigned pair_of(const Record &record, int chunk, int half, int i) {
    return BITS == 8 ? byte_pair(record, chunk, half, i) : nibble_pair(record, chunk, half, i);
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

// 2^23 and byte i of `words`.
DEVICE float biased(const unsigned *words, int i) {
    return bits_float(prmt(words[i / 4], 0x4b000000u, 0x7540 | i % 4));
}
constexpr float BIAS = 8388608.0f;

// The scale of a step of a chunk; exact.
DEVICE float scale_of(const Scales &s, int chunk, int step) {
    if (BITS == 8) return half_of(s.multiples[chunk / 2], chunk % 2);
    if (BITS == 6) return (biased(s.multiples, chunk * 2 + step) - (BIAS + 128.0f)) * s.d;
    return (biased(s.multiples, chunk) - BIAS) * s.d;
}
DEVICE float minimum_of(const Scales &s, int chunk) { return (biased(s.minima, chunk) - BIAS) * s.dmin; }

#endif
