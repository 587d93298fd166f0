// What becomes of the sums of a tile: of warps, of blocks, and rounded with the bias.
#pragma once
#include "matmul.cuh"

// Sums are handled in pieces of four neighbouring outputs of a row of x, piece after piece by the threads of a block.
constexpr unsigned ROW_PIECES = OUTPUTS / 4, TILE_PIECES = ROWS * ROW_PIECES;
constexpr unsigned EACH = (TILE_PIECES + THREADS - 1) / THREADS;  // pieces of a thread
constexpr unsigned AT_ONCE = EACH < 4 ? EACH : 4;                 // pieces that a thread joins at once,
constexpr unsigned AHEAD = 8 / AT_ONCE;  // of so many blocks: 8 loads of 16 bytes are under way, for all registers allow

DEVICE float4 sum_of(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Rounds a piece of a tile and writes what of it lies within the matrix.
DEVICE void output(const Work &work, unsigned tile, unsigned piece, float4 sums) {
    const unsigned row = work.first_row + piece / ROW_PIECES, column = tile * OUTPUTS + piece % ROW_PIECES * 4;
    float four[4] = {sums.x, sums.y, sums.z, sums.w};
    unsigned short *y = work.y + (unsigned long long)row * work.outputs + column;
#pragma unroll
    for (unsigned i = 0; i < 4; i++)
        if (work.bias && column + i < work.outputs) four[i] += Number::to_float(load_earlier(work.bias + column + i));
#pragma unroll
    for (unsigned i = 0; i < 4; i++)
        if (column + i < work.outputs) store(y + i, Number::from_float(four[i]));
}

// Where a block leaves its sums of a tile: it has two places, for the tile it begins in the midst of and its last.
DEVICE float4 *place_of(const Work &work, unsigned block, unsigned tile) {
    const unsigned begun_before = work.begin_of(block) < tile * work.depth;
    return work.partial + ((blockIdx.y * gridDim.x + block) * 2ull + begun_before) * TILE_PIECES;
}

// Adds the sums that all blocks have left of a tile, in the order of blocks, if this one is the last of them.
DEVICE void join(const Work &work, unsigned *last, unsigned tile) {
    const unsigned first = work.block_of(tile * work.depth), end = work.block_of((tile + 1) * work.depth - 1) + 1;
    unsigned *counter = work.counters + blockIdx.y * work.tiles + tile;
    fence();
    sync_block();
    if (threadIdx.x == 0) store_shared(last, unsigned(atomic_add(counter, 1u) == end - first - 1));
    sync_block();
    if (!load_shared(last)) return;
    fence();
    const unsigned pieces = work.rows * ROW_PIECES;
#pragma unroll 1
    for (unsigned start = threadIdx.x; start < pieces; start += AT_ONCE * THREADS) {
        float4 sums[AT_ONCE] = {};
#pragma unroll 1
        for (unsigned block = first; block < end; block += AHEAD) {
            float4 parts[AHEAD][AT_ONCE] = {};
#pragma unroll
            for (unsigned next = 0; next < AHEAD; next++) {
                if (block + next >= end) break;
                const float4 *from = place_of(work, block + next, tile) + start;
#pragma unroll
                for (unsigned i = 0; i < AT_ONCE; i++)
                    if (start + i * THREADS < pieces) parts[next][i] = load_latest(from + i * THREADS);
            }
#pragma unroll
            for (unsigned i = 0; i < AHEAD * AT_ONCE; i++)
                sums[i % AT_ONCE] = sum_of(sums[i % AT_ONCE], parts[i / AT_ONCE][i % AT_ONCE]);
        }
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; i++)
            if (start + i * THREADS < pieces) output(work, tile, start + i * THREADS, sums[i]);
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
    float4 *mine = place_of(work, blockIdx.x, tile);
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < work.rows * ROW_PIECES; i += THREADS) {
        const float *of_warps = sums + i / ROW_PIECES * PITCH + i % ROW_PIECES * 4;
        float4 sum = {};
#pragma unroll
        for (int slice = 0; slice < WARPS_K; slice++)
            sum = sum_of(sum, load_shared(reinterpret_cast<const float4 *>(of_warps + slice * ROWS * PITCH)));
        if (whole)
            output(work, tile, i, sum);
        else
            store(mine + i, sum);
    }
    if (!whole) join(work, last, tile);
}
