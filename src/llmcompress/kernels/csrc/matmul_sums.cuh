// What becomes of the sums of a tile: of warps, of blocks, and rounded with the bias.
#pragma once
#include "matmul.cuh"

DEVICE void output(const Work &work, unsigned row, unsigned column, float sum) {
    if (work.bias) sum += Number::to_float(load(work.bias + column));
    store(work.y + (unsigned long long)(work.first_row + row) * work.outputs + column, Number::from_float(sum));
}

// Where a block leaves its sums of a tile: it has two places, for the tile it begins in the midst of and its last.
DEVICE float *place_of(const Work &work, unsigned block, unsigned tile) {
    const unsigned begun_before = work.begin_of(block) < tile * work.depth;
    return work.partial + ((blockIdx.y * gridDim.x + block) * 2ull + begun_before) * (ROWS * OUTPUTS);
}

// Adds the sums that all blocks have left of a tile, if this one is the last of them.
DEVICE void join(const Work &work, unsigned *last, unsigned tile) {
    const unsigned first = work.block_of(tile * work.depth), end = work.block_of((tile + 1) * work.depth - 1) + 1;
    unsigned *counter = work.counters + blockIdx.y * work.tiles + tile;
    fence();
    sync_block();
    if (threadIdx.x == 0) store_shared(last, unsigned(atomic_add(counter, 1u) == end - first - 1));
    sync_block();
    if (!load_shared(last)) return;
    fence();
    for (unsigned i = threadIdx.x; i < work.rows * OUTPUTS; i += THREADS) {
        const unsigned row = i / OUTPUTS, column = tile * OUTPUTS + i % OUTPUTS;
        if (column >= work.outputs) continue;
        float sum = 0.0f;
        for (unsigned block = first; block < end; block++) sum += load_latest(place_of(work, block, tile) + i);
        output(work, row, column, sum);
    }
    if (threadIdx.x == 0) store(counter, 0u);  // as the next launch wants it
}

// Brings the sums of the block's warps together and writes the tile if it is wholly this block's, or leaves its part.
DEVICE void finish(const Work &work, const Warp &warp, float *sums, unsigned *last, unsigned tile, bool whole,
                   float (&totals)[2][TILES][4]) {
    const unsigned g = warp.lane / 4, t = warp.lane % 4;
#pragma unroll
    for (unsigned i = 0; i < 8 * TILES; i++) {
        const unsigned r = i / 4 / TILES, part = i / 4 % TILES;
        const unsigned row = 8 * part + 2 * t + i % 2, column = warp.along_n * BLOCK_OUTPUTS + 16 * r + i % 4 / 2 * 8 + g;
        store_shared(sums + (warp.along_k * ROWS + row) * PITCH + column, totals[r][part][i % 4]);
        totals[r][part][i % 4] = 0.0f;
    }
    sync_block();
    float *mine = place_of(work, blockIdx.x, tile);
    for (unsigned i = threadIdx.x; i < work.rows * OUTPUTS; i += THREADS) {
        const unsigned row = i / OUTPUTS, column = i % OUTPUTS;
        float sum = 0.0f;
#pragma unroll
        for (int slice = 0; slice < WARPS_K; slice++) sum += load_shared(sums + (slice * ROWS + row) * PITCH + column);
        if (!whole)
            store(mine + i, sum);
        else if (tile * OUTPUTS + column < work.outputs)
            output(work, row, tile * OUTPUTS + column, sum);
    }
    if (!whole) join(work, last, tile);
}
