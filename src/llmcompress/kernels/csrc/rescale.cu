// Scales chosen together with codes: one warp goes over the groups of one row, and its lanes are a group's columns.
//
// For each scale that is tried, the codes are decided column by column, those behind making up for the error as far as the
// group's own part of the Gram matrix lets them; the scale of most gain is taken, if there is any, and the slopes of all
// columns follow (`grids/snapping.py` does the same for all rows at once).
// Tensors [columns, rows] are row-major float32: a column of the matrix is contiguous.
#include "levels.cuh"

// The sum over the lanes of a warp, in all of them.
DEVICE float over_lanes(float value) {
    for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

// A square matrix [size, size], of which the block from `start` on is as wide as a group, times the values of the lanes.
DEVICE float times(const float *square, long long size, int start, int column, int width, bool there, float value) {
    float sum = 0.0f;
    for (int j = 0; j < width; j++) {
        const float other = shuffle(value, j);  // symmetric: rows are read, neighbours by neighbours
        if (there) sum = fmaf(load(square + (start + j) * size + column), other, sum);
    }
    return sum;
}

// slopes, levels [in, rows] and scale [groups, rows]: followed and moved in place. keep [in, rows] or null: 1 for weights
// that stay, 0 for those that are zero. tried [groups, count, rows]. hessian [in, in]; inverse, ahead [groups, width,
// width]: of its diagonal blocks, the latter strictly upper triangular. given [there]: the levels, in ascending order,
// which take `places`, a power of two, in shared memory.
KERNEL rescale(float *slopes, float *levels, const float *keep, float *scale, const float *tried, const float *hessian,
               const float *inverse, const float *ahead, const float *given, int rows, int size, int width, int count,
               int there, int places) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const Table table = fill_table(reinterpret_cast<float *>(shared_memory()), given, there, places, 0, rows, row);
    sync_block();
    if (row >= rows) return;
    const bool mine = lane < width;
    for (int group = 0; group < size / width; group++) {
        const int start = group * width, column = start + lane;
        const long long at = (long long)column * rows + row, block = (long long)group * width * width;
        const float slope = mine ? load_latest(slopes + at) : 0.0f, old = mine ? load_latest(levels + at) : 0.0f;
        const float stays = mine && keep ? load(keep + at) : 1.0f;
        const float now = old * load_latest(scale + (long long)group * rows + row);
        const float aim = now + times(inverse + block, width, 0, lane, width, mine, slope);
        float most = 0.0f, level = old, move = 0.0f, chosen = 0.0f;
        for (int number = 0; number < count; number++) {
            const float by = load(tried + ((long long)group * count + number) * rows + row);
            float left = aim, found = 0.0f;
            for (int j = 0; j < width; j++) {
                const float value = shuffle(left, j), wanted = shuffle(stays, j) != 0.0f ? value : 0.0f;
                const float snapped = nearest(wanted / by, 0.0f, 0.0f, table);
                if (lane == j) found = snapped;
                if (mine) left = fmaf(-load(ahead + block + j * width + lane), fmaf(-snapped, by, value), left);
            }
            const float step = found * by - now;
            const float bent = times(hessian, size, start, column, width, mine, step);
            const float gain = over_lanes((2.0f * slope - bent) * step);
            if (gain > most) most = gain, level = found, move = step, chosen = by;
        }
        if (most == 0.0f) continue;
        if (mine) store(levels + at, level);
        if (lane == 0) store(scale + (long long)group * rows + row, chosen);
        for (int base = 0; base < size; base += 32) {
            const int other = base + lane;
            const bool inside = other < size;
            const float follows = times(hessian, size, start, other, width, inside, move);
            float *to = slopes + (long long)other * rows + row;
            if (inside) store(to, load_latest(to) - follows);
        }
        sync_warp();  // other lanes go on with these slopes
    }
}
