// Weights in progressive groups (QServe, arXiv:2405.04532, section 4.1), from 4 bits to int8.
//
// Weights lie in tiles of 16 channels by 64 inputs, 16 bytes for each lane of a warp: the operand with 16 rows of
// mma.m16n8k32, twice. Lane 4g + t owns inputs 16t ... 16t + 15 of channels g and g + 8; a word holds eight inputs in a
// row, the first four in the low halves of its bytes, and words are (first 8, g), (first 8, g + 8), (last 8, g), ...
// Of each tile and group lie 8 words for g = 0 ... 7: bytes s1, s1 * zero of channel g, then those of g + 8.
//
// GROUP: inputs of a group, 32, 64 or 128.
#ifndef PROGRESSIVE_CUH
#define PROGRESSIVE_CUH

#include "primitives.cuh"

// Four whole numbers (code - zero) * s1 as signed bytes. Each, with 128 added, lies in 1 ... 255: no byte carries.
DEVICE unsigned whole_numbers(unsigned codes, unsigned multiple, unsigned offset) {
    return (codes * multiple + offset) ^ 0x80808080u;
}

// Fragments of 16 channels by 2 x 32 inputs from what a lane owns of a tile and its word of the group.
DEVICE void expand_tile(unsigned (&fragments)[2][4], const uint4 &codes, unsigned group) {
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
    unsigned multiples[2], offsets[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        multiples[half] = group >> (16 * half) & 0xff;
        offsets[half] = 0x80808080u - (group >> (16 * half + 8) & 0xff) * 0x01010101u;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int half = i % 2;
        fragments[i / 2][half] = whole_numbers(words[i] & 0x0f0f0f0f, multiples[half], offsets[half]);
        fragments[i / 2][half + 2] = whole_numbers((words[i] >> 4) & 0x0f0f0f0f, multiples[half], offsets[half]);
    }
}

// The word of the group that a lane's inputs of a tile belong to. width: inputs, a multiple of 128.
DEVICE unsigned load_group(const unsigned *groups, int channel_tile, int tile, int width) {
    const int lane = threadIdx.x % 32, group = (tile * 64 + lane % 4 * 16) / GROUP;
    return load(groups + (size_t(channel_tile) * (width / GROUP) + group) * 8 + lane / 4);
}

#endif
