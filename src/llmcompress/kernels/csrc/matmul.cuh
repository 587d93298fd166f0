// What the parts of matmul.cu share: sizes, the work of a launch, and which of it is a block's.
#pragma once
#include "weights.cuh"

constexpr unsigned WARPS = WARPS_N * WARPS_K, THREADS = 32 * WARPS;
constexpr unsigned ROWS = 8 * TILES, OUTPUTS = BLOCK_OUTPUTS * WARPS_N;
constexpr unsigned X_PIECES = 16 * ROWS;  // of 16 bytes: 128 inputs of all rows
constexpr unsigned X_ROWS = THREADS / 16 / WARPS_K;  // copied at once, an even number
constexpr unsigned STAGE_PIECES = WARPS * BLOCK_PIECES + WARPS_K * X_PIECES;
constexpr unsigned EARLY = STAGES;  // units that a block asks for before earlier launches have ended
constexpr unsigned PITCH = OUTPUTS + 4;  // of a row of sums, such that a warp's land in 32 banks

struct Work {
    const uint4 *codes, *scales, *zeros;
    const unsigned short *x, *bias;
    unsigned short *y;
    float4 *partial;
    unsigned *counters;
    unsigned first_row, rows, outputs;
    int inputs, stride;
    unsigned column_blocks, input_blocks;  // of 32 outputs and of 128 inputs
    unsigned tiles, depth;                 // tiles of outputs, units of each

    // The first so many blocks have one unit more than the others.
    __device__ unsigned least() const { return tiles * depth / gridDim.x; }
    __device__ unsigned longer() const { return tiles * depth % gridDim.x; }
    __device__ unsigned begin_of(unsigned block) const { return least() * block + min(block, longer()); }
    __device__ unsigned block_of(unsigned unit) const {
        const unsigned in_longer = longer() * (least() + 1);
        return unit < in_longer ? unit / (least() + 1) : longer() + (unit - in_longer) / least();
    }
};

// Place of 16 bytes of x in its stage: odd rows change places in halves, so that no two lanes meet in a bank.
DEVICE unsigned x_place(unsigned row, unsigned piece) { return row * 16 + (piece ^ (row & 1) * 4); }

// A thread and its places in a stage, in 16 bytes: of its codes and of x, what it multiplies in the parts of a block with
// even and odd numbers, and what it copies.
struct Warp {
    unsigned lane, along_n, along_k, block, codes, x_even, x_odd, x_copied;

    __device__ explicit Warp(unsigned thread) {
        lane = thread % 32, along_n = thread / 32 / WARPS_K, along_k = thread / 32 % WARPS_K;
        block = held(thread / 32 * BLOCK_PIECES);
        codes = held(block + lane);
        const unsigned x = WARPS * BLOCK_PIECES + along_k * X_PIECES;
        x_even = held(x + x_place(lane / 4, lane % 4)), x_odd = held(x + x_place(lane / 4, 4 + lane % 4));
        const unsigned slice = thread / 16 % WARPS_K, row = thread / 16 / WARPS_K;
        x_copied = held(WARPS * BLOCK_PIECES + slice * X_PIECES + x_place(row, thread % 16));
    }
    __device__ unsigned x_at(int part) const { return (part % 2 ? x_odd : x_even) + part / 2 * 8; }
};
