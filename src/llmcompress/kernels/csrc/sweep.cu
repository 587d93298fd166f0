// A block of columns of a sweep: one warp decides the columns of one row, one after another, its values in registers.
//
// Lane l holds columns l, l + 32, l + 64 and l + 96 of the block. What deciding column j does to those after it is row j
// of `ahead` (strictly upper triangular), whose blocks of 32 columns lie in shared memory from the diagonal on. Behind
// them lie levels that are no whole numbers, one table for all rows or one for each warp, and their midpoints.
// Tensors [columns, rows] are row-major float32: a column of the matrix is contiguous.
#include "levels.cuh"

constexpr int COLUMNS = 128;      // of a block at most
constexpr int STRIPS = COLUMNS / 32;

// Where row j of strip s begins in shared memory: strips of 32 rows hold columns from 32 s on.
DEVICE int place(int strip, int row) {
    return 32 * (strip * COLUMNS - 32 * (strip * (strip - 1) / 2)) + (row - 32 * strip) * (COLUMNS - 32 * strip);
}

// What a row knows of its columns. `index`: the group of each column. Scales, bounds and offsets are [groups, rows].
struct Steps {
    float scale[STRIPS], inverse[STRIPS], low[STRIPS], high[STRIPS], offset[STRIPS];
};

DEVICE void fill_ahead(float *shared, const float *ahead, int size, int start, int count) {
    for (int strip = 0; strip < STRIPS; strip++) {
        const int width = COLUMNS - 32 * strip;
        for (int i = threadIdx.x; i < 32 * width; i += 32 * WARPS) {
            const int row = 32 * strip + i / width, column = 32 * strip + i % width;
            const bool there = row < count && column < count;
            const long long from = (long long)(start + row) * size + start + column;
            store_shared(shared + place(strip, 32 * strip) + i, there ? load(ahead + from) : 0.0f);
        }
    }
    sync_block();
}

DEVICE Steps steps_of(const float *scale, const float *inverse, const float *low, const float *high,
                      const float *offset, const int *index, int rows, int row, int start, int count) {
    Steps steps;
    for (int strip = 0; strip < STRIPS; strip++) {
        const int column = 32 * strip + threadIdx.x % 32;
        const bool there = column < count;
        const long long at = there ? (long long)load(index + start + column) * rows + row : 0;
        steps.scale[strip] = there ? load(scale + at) : 0.0f;
        steps.inverse[strip] = there ? load(inverse + at) : 0.0f;
        steps.low[strip] = there && low ? load(low + at) : 0.0f;
        steps.high[strip] = there && high ? load(high + at) : 0.0f;
        steps.offset[strip] = there && offset ? load(offset + at) : 0.0f;
    }
    return steps;
}

DEVICE void read_row(float (&values)[STRIPS], const float *from, int rows, int row, int start, int count, float none) {
    for (int strip = 0; strip < STRIPS; strip++) {
        const int column = 32 * strip + threadIdx.x % 32;
        values[strip] = from && column < count ? load(from + (long long)(start + column) * rows + row) : none;
    }
}

DEVICE void write_row(float *to, const float (&values)[STRIPS], int rows, int row, int start, int count) {
    for (int strip = 0; strip < STRIPS; strip++) {
        const int column = 32 * strip + threadIdx.x % 32;
        if (column < count) store(to + (long long)(start + column) * rows + row, values[strip]);
    }
}

// Takes `error` of column j of a strip off the columns after it.
template <int strip> DEVICE void spread(float (&values)[STRIPS], const float *shared, int j, float error) {
    const float *share = shared + place(strip, j) + threadIdx.x % 32;
    for (int later = strip; later < STRIPS; later++)
        values[later] = fmaf(-load_shared(share + 32 * (later - strip)), error, values[later]);
}

// GPTQ: rounds a value, and hands its error on.
template <int strip>
DEVICE void round_strip(float (&values)[STRIPS], float (&levels)[STRIPS], float (&errors)[STRIPS],
                        const float (&keep)[STRIPS], const Steps &steps, const Table &table, const float *shared) {
    for (int lane = 0; lane < 32; lane++) {
        const float value = values[strip] - steps.offset[strip];
        const float wanted = (keep[strip] != 0.0f ? value : -steps.offset[strip]) * steps.inverse[strip];
        const float level = nearest(wanted, steps.low[strip], steps.high[strip], table);
        const float error = fmaf(-level, steps.scale[strip], value);
        if (threadIdx.x % 32 == lane) levels[strip] = level, errors[strip] = error;
        spread<strip>(values, shared, 32 * strip + lane, shuffle(error, lane));
    }
}

// Descent: moves a level to where the slope of the loss ends, and bends the slopes of the columns after it.
template <int strip>
DEVICE void move_strip(float (&slopes)[STRIPS], float (&levels)[STRIPS], float (&moves)[STRIPS],
                       const float (&keep)[STRIPS], const float (&curve)[STRIPS], const Steps &steps,
                       const Table &table, const float *shared) {
    for (int lane = 0; lane < 32; lane++) {
        const float old = levels[strip];
        const float wanted = fmaf(slopes[strip] * curve[strip], steps.inverse[strip], old);
        const float moved = nearest(wanted, steps.low[strip], steps.high[strip], table);
        const float level = keep[strip] != 0.0f ? moved : old;
        const float move = (level - old) * steps.scale[strip];
        if (threadIdx.x % 32 == lane) levels[strip] = level, moves[strip] = move;
        spread<strip>(slopes, shared, 32 * strip + lane, shuffle(move, lane));
    }
}

// columns [in, rows]: weights as they are by now, from `start` on `count` of them. levels [in, rows], errors [count,
// rows]: written. keep [in, rows] or null: 1 for weights that stay, 0 for those that become zero. ahead [in, in].
// offset [groups, rows] or null: what is added to scale * level. low, high [groups, rows]: the least and the largest
// level; null where there is a table of them, [levels] or, own for each row, [rows, levels], which takes `places` in
// shared memory, a power of two, or none.
KERNEL round_block(const float *columns, float *levels, float *errors, const float *keep, const float *ahead,
                   const float *scale, const float *inverse, const float *low, const float *high, const float *offset,
                   const int *index, const float *given, int rows, int size, int start, int count, int there,
                   int places, int own) {
    float *shared = reinterpret_cast<float *>(shared_memory());
    const int row = blockIdx.x * WARPS + threadIdx.x / 32;
    const Table table = fill_table(shared + place(STRIPS, COLUMNS), given, there, places, own, rows, row);
    fill_ahead(shared, ahead, size, start, count);
    if (row >= rows) return;
    const Steps steps = steps_of(scale, inverse, low, high, offset, index, rows, row, start, count);
    float values[STRIPS], stay[STRIPS], level[STRIPS], error[STRIPS];
    read_row(values, columns, rows, row, start, count, 0.0f);
    read_row(stay, keep, rows, row, start, count, 1.0f);
    round_strip<0>(values, level, error, stay, steps, table, shared);
    round_strip<1>(values, level, error, stay, steps, table, shared);
    round_strip<2>(values, level, error, stay, steps, table, shared);
    round_strip<3>(values, level, error, stay, steps, table, shared);
    write_row(levels, level, rows, row, start, count);
    write_row(errors, error, rows, row, 0, count);
}

// slopes [in, rows]: of the loss, as they are by now. levels [in, rows]: moved in place. moves [count, rows]: written.
// curve [in]: 1 over the diagonal of the Gram matrix, whose rows after the diagonal are `ahead`.
KERNEL move_block(const float *slopes, float *levels, float *moves, const float *keep, const float *ahead,
                  const float *curve, const float *scale, const float *inverse, const float *low, const float *high,
                  const int *index, const float *given, int rows, int size, int start, int count, int there,
                  int places, int own) {
    float *shared = reinterpret_cast<float *>(shared_memory());
    const int row = blockIdx.x * WARPS + threadIdx.x / 32;
    const Table table = fill_table(shared + place(STRIPS, COLUMNS), given, there, places, own, rows, row);
    fill_ahead(shared, ahead, size, start, count);
    if (row >= rows) return;
    const Steps steps = steps_of(scale, inverse, low, high, nullptr, index, rows, row, start, count);
    float slope[STRIPS], stay[STRIPS], level[STRIPS], move[STRIPS], bent[STRIPS];
    read_row(slope, slopes, rows, row, start, count, 0.0f);
    read_row(level, levels, rows, row, start, count, 0.0f);
    read_row(stay, keep, rows, row, start, count, 1.0f);
    read_row(bent, curve, 1, 0, start, count, 0.0f);
    move_strip<0>(slope, level, move, stay, bent, steps, table, shared);
    move_strip<1>(slope, level, move, stay, bent, steps, table, shared);
    move_strip<2>(slope, level, move, stay, bent, steps, table, shared);
    move_strip<3>(slope, level, move, stay, bent, steps, table, shared);
    write_row(levels, level, rows, row, start, count);
    write_row(moves, move, rows, row, 0, count);
}
