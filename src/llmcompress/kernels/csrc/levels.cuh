// Levels of a grid of single codes: the one that is nearest to a value.
#pragma once
#include "primitives.cuh"

constexpr int WARPS = 8;  // of a thread block, each with a row: neighbours share the sectors of a column

DEVICE float within(float value, float low, float high) { return value < low ? low : value > high ? high : value; }

// Levels of a row in ascending order, and midpoints of neighbours, infinite where there is none. size: a power of two;
// 0 where levels are whole numbers.
struct Table {
    const float *levels, *middles;
    int size;
};

// The level nearest to a value, the upper one of two.
DEVICE float nearest(float value, float low, float high, const Table &table) {
    if (table.size == 0) return within(float(round_even(value)), low, high);
    int at = 0;
    for (int step = table.size / 2; step > 0; step /= 2)
        if (load_shared(table.middles + at + step - 1) <= value) at += step;
    return load_shared(table.levels + at);
}

// Copies levels to shared memory, those of this warp's row if each row has its own; a barrier is to follow.
DEVICE Table fill_table(float *shared, const float *levels, int count, int size, int own, int rows, int row) {
    float *to = shared + (own ? 2 * size * (threadIdx.x / 32) : 0);
    const float *from = levels + (own ? (long long)row * count : 0);
    if (size != 0 && (own ? row < rows : threadIdx.x < 32))
        for (int i = threadIdx.x % 32; i < size; i += 32) {
            const float level = i < count ? load(from + i) : 0.0f, infinite = bits_float(0x7f800000u);
            store_shared(to + i, level);
            store_shared(to + size + i, i + 1 < count ? 0.5f * (level + load(from + i + 1)) : infinite);
        }
    return {to, to + size, size};
}
