// Copies of weights and activations to shared memory, ahead of what is multiplied.
#pragma once
#include "matmul.cuh"

// Asks for the codes and scales of the first units of this block to be brought to the cache, some lines by each lane.
DEVICE void bring_first_units(const Work &work, const Warp &warp) {
    constexpr unsigned LINES = BITS * 4;  // of the codes of a warp's part of a unit
    const unsigned begin = work.begin_of(blockIdx.x), count = min(EARLY, work.begin_of(blockIdx.x + 1) - begin);
#pragma unroll 1
    for (unsigned i = warp.lane; i < count * LINES; i += 32) {
        const unsigned unit = begin + i / LINES, line = i % LINES;
        const unsigned column = unit / work.depth * WARPS_N + warp.along_n;
        const unsigned block = unit % work.depth * WARPS_K + warp.along_k;
        if (column >= work.column_blocks || block >= work.input_blocks) continue;
        const unsigned long long at = (unsigned long long)column * work.input_blocks + block;
        bring_to_cache(work.codes + at * (BITS * 32) + line * 8);
        if (int(line * 8) < SCALE_PIECES) bring_to_cache(work.scales + at * SCALE_PIECES + line * 8);
        if (int(line * 8) < ZERO_PIECES) bring_to_cache(work.zeros + at * ZERO_PIECES + line * 8);
    }
}

// What a thread copies, unit by unit. What lies beyond the ends of W or x is zeros; rows that x lacks are whatever lies
// there, since rows do not mix and theirs are not written.
struct Source {
    const uint4 *codes, *scales, *zeros, *x;
    int left;  // inputs from where x stands on
    unsigned rows;  // of x, from this thread's first one on
    unsigned tile, step, block, end;
    unsigned long long once, often;

    __device__ void stand_at(const Work &work, const Warp &warp, unsigned new_tile, unsigned new_step) {
        tile = new_tile, step = new_step;
        const unsigned column = tile * WARPS_N + warp.along_n;
        block = step * WARPS_K + warp.along_k;
        end = column < work.column_blocks ? work.input_blocks : 0;
        const unsigned long long at = (unsigned long long)column * work.input_blocks + block;
        codes = work.codes + at * (BITS * 32) + warp.lane;
        scales = work.scales + at * SCALE_PIECES + warp.lane;
        zeros = work.zeros + at * ZERO_PIECES + warp.lane;
        const unsigned input = (step * WARPS_K + threadIdx.x / 16 % WARPS_K) * BLOCK_INPUTS + threadIdx.x % 16 * 8;
        const unsigned row = threadIdx.x / 16 / WARPS_K;
        x = reinterpret_cast<const uint4 *>(work.x + (unsigned long long)(work.first_row + row) * work.stride + input);
        left = work.inputs - int(input);
        rows = held(row < work.rows ? work.rows - row : 0);
    }

    // Starts the copies of one unit and goes on to the next.
    __device__ void fetch(const Work &work, const Warp &warp, uint4 *stage) {
        const int bytes = block < end ? 16 : 0;
        uint4 *mine = stage + warp.codes;
#pragma unroll
        for (int i = 0; i < BITS; i++) copy_async_if(true, mine + 32 * i, codes + 32 * i, bytes, once);
        copy_async_if(int(warp.lane) < SCALE_PIECES, mine + 32 * BITS, scales, bytes, once);
        if (ZERO < 0) copy_async_if(int(warp.lane) < ZERO_PIECES, mine + 32 * BITS + SCALE_PIECES, zeros, bytes, once);
        const int x_bytes = max(0, min(16, 2 * left));
#pragma unroll
        for (unsigned j = 0; j < ROWS; j += X_ROWS)
            copy_async_if(j < rows, stage + warp.x_copied + 16 * j, x + (long long)work.stride / 8 * j, x_bytes, often);
        x += WARPS_K * BLOCK_INPUTS / 8, left -= WARPS_K * BLOCK_INPUTS;
        codes += WARPS_K * BITS * 32, scales += WARPS_K * SCALE_PIECES, zeros += WARPS_K * ZERO_PIECES;
        block += WARPS_K;
        if (++step == work.depth) stand_at(work, warp, tile + 1, 0);
    }
};
