// y = x W^T + bias for few rows of x: W in tiles of whole numbers (weights.cuh), x and y in 16-bit floats.
//
// Codes less zero points are exact in 16 bits; tensor cores multiply them by x and sum in float32; the sum of a group is
// multiplied by its scale in float32. W is the 16-row operand, rows of x are the 8 columns of the other.
//
// Macros besides those of weights.cuh: TILES (of 8 rows of x that a block computes), WARPS_N, WARPS_K (8 warps: along
// outputs and along inputs), STAGES (of the pipeline of copies), BLOCKS (per multiprocessor at least).
//
// A unit of work is 32 * WARPS_N outputs x 128 * WARPS_K inputs. All units, inputs fastest, are shared out evenly to the
// blocks of grid.x; grid.y is blocks of rows. Where blocks share a tile of outputs, each leaves its sums in `partial`,
// and the last to come adds them up in the order of blocks, whoever it is.
#include "weights.cuh"

constexpr int THREADS = 32 * WARPS_N * WARPS_K;
constexpr int ROWS = 8 * TILES, OUTPUTS = BLOCK_OUTPUTS * WARPS_N;
constexpr int X_PIECES = 16 * ROWS;  // of 16 bytes: 128 inputs of all rows
constexpr int STAGE_PIECES = WARPS_N * WARPS_K * BLOCK_PIECES + WARPS_K * X_PIECES;
constexpr int PITCH = OUTPUTS + 4;  // of a row of sums, such that a warp's land in 32 banks

struct Work {
    const uint4 *codes, *scales, *zeros;
    const unsigned short *x, *bias;
    unsigned short *y;
    float *partial;
    unsigned *counters;
    int rows, first_row, outputs, inputs, stride;
    int column_blocks, input_blocks;  // of 32 outputs and of 128 inputs
    int tiles, depth;                 // tiles of outputs, units of each

    __device__ long long units() const { return (long long)tiles * depth; }
    __device__ long long begin_of(int block) const { return units() * block / gridDim.x; }
    __device__ int block_of(long long unit) const { return int(((unit + 1) * gridDim.x - 1) / units()); }
};

// Place of 16 bytes of x in its stage: odd rows change places in halves, so that no two lanes meet in a bank.
DEVICE int x_place(int row, int piece) { return row * 16 + (piece ^ (row & 1) * 4); }

struct Warp {
    int lane, along_n, along_k;
};

// Starts the copies of one unit. What lies beyond the ends of W or x is zeros.
DEVICE void fetch(const Work &work, const Warp &warp, uint4 *stage, int tile, int step, unsigned long long policy) {
    const int column = tile * WARPS_N + warp.along_n, block = step * WARPS_K + warp.along_k;
    const int bytes = column < work.column_blocks && block < work.input_blocks ? 16 : 0;
    const long long at = bytes ? (long long)column * work.input_blocks + block : 0;
    uint4 *mine = stage + (warp.along_n * WARPS_K + warp.along_k) * BLOCK_PIECES + warp.lane;
    const uint4 *codes = work.codes + at * (BITS * 32) + warp.lane;
#pragma unroll
    for (int i = 0; i < BITS; i++) copy_async(mine + 32 * i, codes + 32 * i, bytes, policy);
    if (warp.lane < SCALE_PIECES) copy_async(mine + 32 * BITS, work.scales + at * SCALE_PIECES + warp.lane, bytes, policy);
    if (warp.lane < ZERO_PIECES)
        copy_async(mine + 32 * BITS + SCALE_PIECES, work.zeros + at * ZERO_PIECES + warp.lane, bytes, policy);

    uint4 *x = stage + WARPS_N * WARPS_K * BLOCK_PIECES;
    for (int i = threadIdx.x; i < work.rows * 16 * WARPS_K; i += THREADS) {
        const int piece = i % 16, slice = i / 16 % WARPS_K, row = i / 16 / WARPS_K;
        const int input = (step * WARPS_K + slice) * BLOCK_INPUTS + piece * 8, left = work.inputs - input;
        const unsigned short *from = work.x + (long long)(work.first_row + row) * work.stride + (left > 0 ? input : 0);
        copy_async(x + slice * X_PIECES + x_place(row, piece), reinterpret_cast<const uint4 *>(from),
                   left >= 8 ? 16 : left > 0 ? 2 * left : 0);
    }
}

// Adds the products of one warp's block to `totals` [16 x 16 tiles of outputs][tiles of rows][registers].
DEVICE void multiply(const Warp &warp, const uint4 *stage, float (&totals)[2][TILES][4]) {
    const uint4 *mine = stage + (warp.along_n * WARPS_K + warp.along_k) * BLOCK_PIECES;
    const uint4 *x = stage + WARPS_N * WARPS_K * BLOCK_PIECES + warp.along_k * X_PIECES;
    const auto *scales = reinterpret_cast<const ScaleBits *>(mine + 32 * BITS);
    const auto *zeros = reinterpret_cast<const unsigned *>(mine + 32 * BITS + SCALE_PIECES);
    const int g = warp.lane / 4, t = warp.lane % 4;
    unsigned words[LANE_WORDS];
#pragma unroll
    for (int i = 0; i < BITS; i++) {
        const uint4 four = load_shared(mine + 32 * i + warp.lane);
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
    float sums[2][TILES][4];
    float scale[4];
    Offset offset[4];
#pragma unroll
    for (int part = 0; part < BLOCK_INPUTS / 32; part++) {  // two k-steps
        const int group = part * 32 / GROUP;
        if (part * 32 % GROUP == 0) {
            scales_of(load_shared(scales + group * 8 + g), scale);
            const unsigned zero = ZERO < 0 ? load_shared(zeros + group * 8 + g) : 0;
#pragma unroll
            for (int i = 0; i < 4; i++) offset[i] = offset_of(zero, i);
#pragma unroll
            for (int i = 0; i < 8 * TILES; i++) sums[i / 4 / TILES][i / 4 % TILES][i % 4] = 0.0f;
        }
        uint4 columns[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) columns[tile] = load_shared(x + x_place(8 * tile + g, 4 * part + t));
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int step = 0; step < 2; step++) {
                unsigned a[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[i] = pair_of(words + (part / 2 * 2 + r) * BITS, 8 * (part % 2) + 4 * step + i, offset[2 * r + i % 2]);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const uint4 &four = columns[tile];
                    const unsigned b[2] = {step ? four.z : four.x, step ? four.w : four.y};
                    Number::mma(sums[r][tile], a, b);
                }
            }
        if ((part + 1) * 32 % GROUP == 0)
#pragma unroll
            for (int i = 0; i < 8 * TILES; i++) {
                const int r = i / 4 / TILES, tile = i / 4 % TILES;
                totals[r][tile][i % 4] = fmaf(sums[r][tile][i % 4], scale[2 * r + i % 4 / 2], totals[r][tile][i % 4]);
            }
    }
}

DEVICE void output(const Work &work, int row, int column, float sum) {
    if (work.bias) sum += Number::to_float(load(work.bias + column));
    store(work.y + (long long)(work.first_row + row) * work.outputs + column, Number::from_float(sum));
}

// Where a block leaves its sums of a tile: it has two places, for the tile it begins in the midst of and its last.
DEVICE float *place_of(const Work &work, int block, int tile) {
    const bool begun_before = work.begin_of(block) < (long long)tile * work.depth;
    return work.partial + ((blockIdx.y * gridDim.x + block) * 2ll + begun_before) * (ROWS * OUTPUTS);
}

// Brings the sums of the block's warps together and writes the tile, or leaves them for the last who has part in it.
DEVICE void finish(const Work &work, const Warp &warp, float *sums, unsigned *last, int tile, bool whole,
                   float (&totals)[2][TILES][4]) {
    const int g = warp.lane / 4, t = warp.lane % 4;
#pragma unroll
    for (int i = 0; i < 8 * TILES; i++) {
        const int r = i / 4 / TILES, part = i / 4 % TILES;
        const int row = 8 * part + 2 * t + i % 2, column = warp.along_n * BLOCK_OUTPUTS + 16 * r + g + i % 4 / 2 * 8;
        store_shared(sums + (warp.along_k * ROWS + row) * PITCH + column, totals[r][part][i % 4]);
        totals[r][part][i % 4] = 0.0f;
    }
    sync_block();
    const int columns = min(OUTPUTS, work.outputs - tile * OUTPUTS);
    float *mine = place_of(work, blockIdx.x, tile);
    for (int i = threadIdx.x; i < work.rows * OUTPUTS; i += THREADS) {
        const int row = i / OUTPUTS, column = i % OUTPUTS;
        float sum = 0.0f;
#pragma unroll
        for (int slice = 0; slice < WARPS_K; slice++) sum += load_shared(sums + (slice * ROWS + row) * PITCH + column);
        if (!whole)
            store(mine + i, sum);
        else if (column < columns)
            output(work, row, tile * OUTPUTS + column, sum);
    }
    if (whole) return;

    const long long first_unit = (long long)tile * work.depth;
    const int first = work.block_of(first_unit), end = work.block_of(first_unit + work.depth - 1) + 1;
    unsigned *counter = work.counters + blockIdx.y * work.tiles + tile;
    fence();
    sync_block();
    if (threadIdx.x == 0) store_shared(last, unsigned(atomic_add(counter, 1u) == unsigned(end - first - 1)));
    sync_block();
    if (!load_shared(last)) return;
    fence();
    for (int i = threadIdx.x; i < work.rows * OUTPUTS; i += THREADS) {
        const int row = i / OUTPUTS, column = i % OUTPUTS;
        if (column >= columns) continue;
        float sum = 0.0f;
        for (int block = first; block < end; block++) sum += load_latest(place_of(work, block, tile) + i);
        output(work, row, tile * OUTPUTS + column, sum);
    }
    if (threadIdx.x == 0) store(counter, 0u);  // as the next launch wants it
}

// x [m, k], rows `stride` elements apart and on 16 bytes. y [m, n], overwritten. bias [n] or null. counters: zeros, one
// for each tile of outputs and block of rows; zeros again when the kernel ends.
KERNEL __launch_bounds__(THREADS, BLOCKS)
    matmul(const uint4 *codes, const uint4 *scales, const uint4 *zeros, const unsigned short *x,
           const unsigned short *bias, unsigned short *y, float *partial, unsigned *counters, int m, int n, int k,
           int stride) {
    Work work{codes, scales, zeros, x, bias, y, partial, counters};
    work.first_row = blockIdx.y * ROWS, work.rows = min(ROWS, m - work.first_row);
    work.outputs = n, work.inputs = k, work.stride = stride;
    work.column_blocks = (n + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS, work.tiles = (n + OUTPUTS - 1) / OUTPUTS;
    work.input_blocks = (k + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
    work.depth = (work.input_blocks + WARPS_K - 1) / WARPS_K;
    const int number = threadIdx.x / 32;
    const Warp warp{int(threadIdx.x % 32), number / WARPS_K, number % WARPS_K};

    uint4 *stages = reinterpret_cast<uint4 *>(shared_memory());
    float *sums = reinterpret_cast<float *>(stages + STAGES * STAGE_PIECES);
    unsigned *last = reinterpret_cast<unsigned *>(sums + WARPS_K * ROWS * PITCH);
    for (int i = threadIdx.x; i < STAGES * WARPS_K * (ROWS - work.rows) * 16; i += THREADS) {  // rows that x lacks
        const int slice = i / 16 % WARPS_K, stage = i / 16 / WARPS_K % STAGES, row = work.rows + i / 16 / WARPS_K / STAGES;
        uint4 *rows = stages + stage * STAGE_PIECES + WARPS_N * WARPS_K * BLOCK_PIECES + slice * X_PIECES;
        store_shared(rows + x_place(row, i % 16), make_uint4(0, 0, 0, 0));
    }

    const unsigned long long policy = copy_policy(gridDim.y == 1);
    const long long begin = work.begin_of(blockIdx.x);
    const int count = int(work.begin_of(blockIdx.x + 1) - begin);
    int tile = int(begin / work.depth), step = int(begin % work.depth);
    int next_tile = tile, next_step = step, fetched = 0;
    const auto fetch_next = [&] {
        if (fetched < count) {
            fetch(work, warp, stages + fetched % STAGES * STAGE_PIECES, next_tile, next_step, policy);
            if (++next_step == work.depth) next_step = 0, next_tile++;
            fetched++;
        }
        copy_commit();
    };
    for (int i = 0; i < STAGES - 1; i++) fetch_next();

    float totals[2][TILES][4] = {};
    int first_step = step;
    for (int i = 0; i < count; i++) {
        copy_wait<STAGES - 2>();
        sync_block();
        fetch_next();
        multiply(warp, stages + i % STAGES * STAGE_PIECES, totals);
        if (++step == work.depth || i + 1 == count) {
            finish(work, warp, sums, last, tile, first_step == 0 && step == work.depth, totals);
            step = first_step = 0, tile++;
        }
    }
    copy_wait<0>();
}
