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

constexpr unsigned WARPS = WARPS_N * WARPS_K, THREADS = 32 * WARPS;
constexpr unsigned ROWS = 8 * TILES, OUTPUTS = BLOCK_OUTPUTS * WARPS_N;
constexpr unsigned X_PIECES = 16 * ROWS;  // of 16 bytes: 128 inputs of all rows
constexpr unsigned X_COPIES = (X_PIECES * WARPS_K + THREADS - 1) / THREADS;  // of each thread
constexpr unsigned STAGE_PIECES = WARPS * BLOCK_PIECES + WARPS_K * X_PIECES;
constexpr unsigned PITCH = OUTPUTS + 4;  // of a row of sums, such that a warp's land in 32 banks

struct Work {
    const uint4 *codes, *scales, *zeros;
    const unsigned short *x, *bias;
    unsigned short *y;
    float *partial;
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

struct Warp {
    unsigned lane, along_n, along_k;
    __device__ unsigned place() const { return (along_n * WARPS_K + along_k) * BLOCK_PIECES; }
};

// Place of 16 bytes of x in its stage: odd rows change places in halves, so that no two lanes meet in a bank.
DEVICE unsigned x_place(unsigned row, unsigned piece) { return row * 16 + (piece ^ (row & 1) * 4); }

// What a thread copies, unit by unit. What lies beyond the ends of W or x is zeros.
struct Source {
    const uint4 *codes, *scales, *zeros, *x[X_COPIES];
    int left[X_COPIES];  // inputs from where x stands on
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
#pragma unroll
        for (unsigned j = 0; j < X_COPIES; j++) {
            const unsigned i = threadIdx.x + j * THREADS, slice = i / 16 % WARPS_K, row = i / 16 / WARPS_K;
            const unsigned input = (step * WARPS_K + slice) * BLOCK_INPUTS + i % 16 * 8;
            const unsigned short *from = work.x + (unsigned long long)(work.first_row + row) * work.stride + input;
            x[j] = reinterpret_cast<const uint4 *>(from);
            left[j] = work.inputs - int(input);
        }
    }

    // Starts the copies of one unit and goes on to the next.
    __device__ void fetch(const Work &work, const Warp &warp, uint4 *stage) {
        const int bytes = block < end ? 16 : 0;
        uint4 *mine = stage + warp.place() + warp.lane;
#pragma unroll
        for (int i = 0; i < BITS; i++) copy_async_if(true, mine + 32 * i, codes + 32 * i, bytes, once);
        copy_async_if(int(warp.lane) < SCALE_PIECES, mine + 32 * BITS, scales, bytes, once);
        if (ZERO < 0) copy_async_if(int(warp.lane) < ZERO_PIECES, mine + 32 * BITS + SCALE_PIECES, zeros, bytes, once);
#pragma unroll
        for (unsigned j = 0; j < X_COPIES; j++) {
            const unsigned i = threadIdx.x + j * THREADS, slice = i / 16 % WARPS_K, row = i / 16 / WARPS_K;
            copy_async_if(row < work.rows, stage + WARPS * BLOCK_PIECES + slice * X_PIECES + x_place(row, i % 16), x[j],
                          max(0, min(16, 2 * left[j])), often);
            x[j] += WARPS_K * BLOCK_INPUTS / 8, left[j] -= WARPS_K * BLOCK_INPUTS;
        }
        codes += WARPS_K * BITS * 32, scales += WARPS_K * SCALE_PIECES, zeros += WARPS_K * ZERO_PIECES;
        block += WARPS_K;
        if (++step == work.depth) stand_at(work, warp, tile + 1, 0);
    }
};

// Adds the products of one warp's block to `totals` [16 x 16 tiles of outputs][tiles of rows][registers].
DEVICE void multiply(const Warp &warp, const uint4 *stage, float (&totals)[2][TILES][4]) {
    const uint4 *mine = stage + warp.place();
    const uint4 *x = stage + WARPS * BLOCK_PIECES + warp.along_k * X_PIECES;
    const auto *scales = reinterpret_cast<const ScaleBits *>(mine + 32 * BITS);
    const auto *zeros = reinterpret_cast<const unsigned *>(mine + 32 * BITS + SCALE_PIECES);
    const unsigned g = warp.lane / 4, t = warp.lane % 4;
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
        unsigned a[2][2][4];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = i / 8, step = i / 4 % 2;
            const unsigned *unit = words + (part / 2 * 2 + r) * BITS;
            a[r][step][i % 4] = pair_of(unit, 8 * (part % 2) + i % 8, offset[2 * r + i % 2]);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint4 four = load_shared(x + x_place(8 * tile + g, 4 * part + t));
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

// Clears the rows that x lacks in all stages: no copy writes them.
DEVICE void clear_rows(const Work &work, uint4 *stages) {
    const unsigned missing = (ROWS - work.rows) * 16;  // pieces
    for (unsigned i = threadIdx.x; i < STAGES * WARPS_K * missing; i += THREADS) {
        const unsigned piece = i % missing, slice = i / missing % WARPS_K, stage = i / missing / WARPS_K;
        uint4 *rows = stages + stage * STAGE_PIECES + WARPS * BLOCK_PIECES + slice * X_PIECES;
        store_shared(rows + x_place(work.rows + piece / 16, piece % 16), make_uint4(0, 0, 0, 0));
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
           const unsigned short *bias, unsigned short *y, float *partial, unsigned *counters, int m, int n, int k,
           int stride) {
    Work work{codes, scales, zeros, x, bias, y, partial, counters};
    work.first_row = blockIdx.y * ROWS, work.rows = min(ROWS, m - work.first_row);
    work.outputs = n, work.inputs = k, work.stride = stride;
    work.column_blocks = (n + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS, work.tiles = (n + OUTPUTS - 1) / OUTPUTS;
    work.input_blocks = (k + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
    work.depth = (work.input_blocks + WARPS_K - 1) / WARPS_K;
    const unsigned number = threadIdx.x / 32;
    const Warp warp{threadIdx.x % 32, number / WARPS_K, number % WARPS_K};

    uint4 *stages = reinterpret_cast<uint4 *>(shared_memory());
    float *sums = reinterpret_cast<float *>(stages + STAGES * STAGE_PIECES);
    unsigned *last = reinterpret_cast<unsigned *>(sums + WARPS_K * ROWS * PITCH);
    if (work.rows < ROWS) clear_rows(work, stages);
    run(work, warp, stages, sums, last);
}
