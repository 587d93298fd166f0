// y = x W^T + bias for few rows of x: W in tiles (weights.cuh), x and y in 16-bit floats.
//
// Codes less zero points, or levels, are exact in 16 bits; tensor cores multiply them by x and sum in float32; the sum of
// a group is multiplied by its scale in float32. W is the 16-row operand, rows of x are the 8 columns of the other.
//
// Macros besides those of weights.cuh: TILES (of 8 rows of x that a block computes), WARPS_N, WARPS_K (8 warps: along
// outputs and along inputs), STAGES (of the pipeline of copies), BLOCKS (per multiprocessor at least).
//
// A unit of work is 32 * WARPS_N outputs x 128 * WARPS_K inputs. All units, inputs fastest, are shared out evenly to the
// blocks of grid.x; grid.y is blocks of rows. Where blocks share a tile of outputs, each leaves its sums in `partial`,
// and the last to come adds them up in the order of blocks, whoever it is.
#include "matmul_copies.cuh"
#include "matmul_sums.cuh"

// Adds the products of one warp's block to `totals` [16 x 16 tiles of outputs][tiles of rows][registers].
DEVICE void multiply(const Warp &warp, const uint4 *stage, float (&totals)[2][TILES][4]) {
    const uint4 *codes = stage + warp.codes, *rest = stage + warp.block + 32 * BITS;
    const auto *scales = reinterpret_cast<const ScaleBits *>(rest) + warp.lane / 4;
    const auto *zeros = reinterpret_cast<const unsigned *>(rest + SCALE_PIECES) + warp.lane / 4;
    unsigned words[LANE_WORDS];
    float sums[2][TILES][4];
    float scale[4];
    Offset offset[4];
#pragma unroll
    for (int part = 0; part < BLOCK_INPUTS / 32; part++) {  // two k-steps
        const int group = part * 32 / GROUP, half = part / 2;
        if (part % 2 == 0)
#pragma unroll
            for (int i = (half * BITS + 1) / 2; i < ((half + 1) * BITS + 1) / 2; i++) {
                const uint4 four = load_shared(codes + 32 * i);
                words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
            }
        if (part * 32 % (FLOATS ? 32 : GROUP) == 0) {
            const unsigned zero = ZERO < 0 ? load_shared(zeros + zero_at(part, warp.lane) * 8) : 0;
#pragma unroll
            for (int i = 0; i < 4; i++) offset[i] = offset_of(zero, i);
        }
        if (part * 32 % GROUP == 0) {
            scales_of(load_shared(scales + group * 8), scale);
#pragma unroll
            for (int i = 0; i < 8 * TILES; i++) sums[i / 4 / TILES][i / 4 % TILES][i % 4] = 0.0f;
        }
        unsigned a[2][2][4];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = i / 8, step = i / 4 % 2;
            const unsigned *unit = words + (2 * half + r) * BITS;
            a[r][step][i % 4] = pair_of(unit, 8 * (part % 2) + i % 8, offset[2 * r + i % 2]);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint4 four = load_shared(stage + warp.x_at(part) + 128 * tile);
            const unsigned b[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
            for (int i = 0; i < 4; i++) Number::mma(sums[i % 2][tile], a[i % 2][i / 2], b[i / 2]);
        }
        if ((part + 1) * 32 % GROUP == 0)
#pragma unroll
            for (int i = 0; i < 8 * TILES; i++) {
                const int r = i / 4 / TILES, tile = i / 4 % TILES;
                totals[r][tile][i % 4] = fmaf(sums[r][tile][i % 4], scale[2 * r + i % 4 / 2], totals[r][tile][i % 4]);
            }
    }
}

// Multiplies the units of this block, with copies of the next ones under way.
DEVICE void run(const Work &work, const Warp &warp, uint4 *stages, float *sums, unsigned *last) {
    const unsigned begin = work.begin_of(blockIdx.x);
    unsigned left = work.begin_of(blockIdx.x + 1) - begin, to_fetch = left;
    unsigned tile = begin / work.depth, step = begin % work.depth;
    uint4 *const end = stages + STAGES * STAGE_PIECES, *next_stage = stages, *stage = stages;
    Source source;
    source.often = leave_as_others(), source.once = gridDim.y == 1 ? leave_first() : source.often;
    source.stand_at(work, warp, tile, step);
    const auto fetch_next = [&] {
        if (to_fetch) {
            source.fetch(work, warp, next_stage);
            to_fetch--;
            if ((next_stage += STAGE_PIECES) == end) next_stage = stages;
        }
        copy_commit();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) fetch_next();

    float totals[2][TILES][4] = {};
    bool from_start = step == 0;
    while (left) {
        copy_wait<STAGES - 2>();
        sync_block();
        fetch_next();
        multiply(warp, stage, totals);
        if ((stage += STAGE_PIECES) == end) stage = stages;
        left--;
        if (++step == work.depth || left == 0) {
            finish(work, warp, sums, last, tile, from_start && step == work.depth, totals);
            from_start = true, step = 0, tile++;
        }
    }
    copy_wait<0>();
}

// x [m, k], rows `stride` elements apart and on 16 bytes. y [m, n], overwritten. bias [n] or null. counters: zeros, one
// for each tile of outputs and block of rows; zeros again when the kernel ends.
KERNEL __launch_bounds__(THREADS, BLOCKS)
    matmul(const uint4 *codes, const uint4 *scales, const uint4 *zeros, const unsigned short *x,
           const unsigned short *bias, unsigned short *y, float4 *partial, unsigned *counters, int m, int n, int k,
           int stride) {
    Work work{codes, scales, zeros, x, bias, y, partial, counters};
    work.first_row = blockIdx.y * ROWS, work.rows = min(ROWS, m - work.first_row);
    work.outputs = n, work.inputs = k, work.stride = stride;
    work.column_blocks = (n + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS, work.tiles = (n + OUTPUTS - 1) / OUTPUTS;
    work.input_blocks = (k + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
    work.depth = (work.input_blocks + WARPS_K - 1) / WARPS_K;
    const Warp warp(threadIdx.x);

    bring_first_units(work, warp);
    wait_for_earlier();
    let_next_begin();
    uint4 *stages = reinterpret_cast<uint4 *>(shared_memory());
    float *sums = reinterpret_cast<float *>(stages + STAGES * STAGE_PIECES);
    unsigned *last = reinterpret_cast<unsigned *>(sums + WARPS_K * ROWS * PITCH);
    run(work, warp, stages, sums, last);
}
