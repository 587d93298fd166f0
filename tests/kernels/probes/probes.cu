// One kernel per primitive: inputs from arrays, one element or fragment a thread, outputs into arrays.
#include "primitives.cuh"

#if defined(BFLOAT)
using T = Bfloat;
#else
using T = Half;
#endif

// d [4, n]: by four tables.
KERNEL probe_lop3(const unsigned *a, const unsigned *b, const unsigned *c, unsigned *d) {
    const int i = threadIdx.x, n = blockDim.x;
    const unsigned x = load(a + i), y = load(b + i), z = load(c + i);
    store(d + i, lop3<0xc0>(x, y, z));
    store(d + n + i, lop3<0xea>(x, y, z));
    store(d + 2 * n + i, lop3<0x96>(x, y, z));
    store(d + 3 * n + i, lop3<0xca>(x, y, z));
}

KERNEL probe_prmt(const unsigned *a, const unsigned *b, const unsigned *c, unsigned *d) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    store(d + i, prmt(load(a + i), load(b + i), load(c + i)));
}

KERNEL probe_dp4a(const int *a, const int *b, const int *c, int *d) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    store(d + i, dp4a(load(a + i), load(b + i), load(c + i)));
}

KERNEL probe_fma2(const unsigned *a, const unsigned *b, const unsigned *c, unsigned *d) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    store(d + i, T::fma2(load(a + i), load(b + i), load(c + i)));
}

KERNEL probe_convert(const float *x, unsigned short *y, float *back) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned short bits = T::from_float(load(x + i));
    store(y + i, bits);
    store(back + i, T::to_float(bits));
}

KERNEL probe_round(const float *x, int *y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    store(y + i, round_even(load(x + i)));
}

// a [32, 4] and b [32, 2]: the words of each lane; c, d and alone, which begins at zero, [32, 4].
KERNEL probe_mma(const unsigned *a, const unsigned *b, const float *c, float *d, float *alone) {
    const int lane = threadIdx.x;
    unsigned x[4], y[2];
    float z[4];
    for (int i = 0; i < 4; i++) x[i] = load(a + 4 * lane + i), z[i] = load(c + 4 * lane + i);
    for (int i = 0; i < 2; i++) y[i] = load(b + 2 * lane + i);
    T::mma(z, x, y);
    for (int i = 0; i < 4; i++) store(d + 4 * lane + i, z[i]);
    T::multiply(z, x, y);
    for (int i = 0; i < 4; i++) store(alone + 4 * lane + i, z[i]);
}

KERNEL probe_mma_int8(const unsigned *a, const unsigned *b, const int *c, int *d) {
    const int lane = threadIdx.x;
    unsigned x[4], y[2];
    int z[4];
    for (int i = 0; i < 4; i++) x[i] = load(a + 4 * lane + i), z[i] = load(c + 4 * lane + i);
    for (int i = 0; i < 2; i++) y[i] = load(b + 2 * lane + i);
    mma_int8(z, x, y);
    for (int i = 0; i < 4; i++) store(d + 4 * lane + i, z[i]);
}

// The same of floats, as TF32.
KERNEL probe_mma_tf32(const float *a, const float *b, const float *c, float *d) {
    const int lane = threadIdx.x;
    float x[4], y[2], z[4];
    for (int i = 0; i < 4; i++) x[i] = load(a + 4 * lane + i), z[i] = load(c + 4 * lane + i);
    for (int i = 0; i < 2; i++) y[i] = load(b + 2 * lane + i);
    mma_tf32(z, x, y);
    for (int i = 0; i < 4; i++) store(d + 4 * lane + i, z[i]);
}

KERNEL probe_shuffles(const float *x, const int *lanes, int by, float *chosen, float *crossed, float *down) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float value = load(x + i);
    store(chosen + i, shuffle(value, load(lanes + i)));
    store(crossed + i, shuffle_xor(value, by));
    store(down + i, shuffle_down(value, by));
}

// Four 8 x 8 matrices [32 rows, 8] of 16 bits to fragments [32 lanes, 4].
KERNEL probe_matrices(const uint4 *rows, unsigned *d) {
    uint4 *tile = reinterpret_cast<uint4 *>(shared_memory());
    const int lane = threadIdx.x;
    store_shared(tile + lane, load(rows + lane));
    sync_warp();
    unsigned words[4];
    load_matrices(words, tile + lane);
    for (int i = 0; i < 4; i++) store(d + 4 * lane + i, words[i]);
}

// Rows of 16 bytes by way of shared memory, in reverse; of each `bytes` are copied. wait, sync: what a kernel must do.
KERNEL probe_copy(const uint4 *from, uint4 *to, int bytes, int wait, int sync) {
    uint4 *tile = reinterpret_cast<uint4 *>(shared_memory());
    const int i = threadIdx.x, n = blockDim.x;
    copy_async(tile + i, from + i, bytes);
    copy_commit();
    if (wait) copy_wait<0>();
    if (sync) sync_block();
    store(to + i, load_shared(tile + n - 1 - i));
    copy_wait<0>();
}

// Sums of all threads of all blocks, and which block came last.
KERNEL probe_atomics(unsigned *count, float *sum, unsigned *last) {
    atomic_add(sum, 1.0f);
    fence();
    sync_block();
    if (threadIdx.x == 0 && atomic_add(count, 1u) == gridDim.x - 1) store(last, load_latest(count));
}

// fault: which mistake to make.
KERNEL probe_fault(const unsigned *x, unsigned *y, int fault) {
    unsigned *words = reinterpret_cast<unsigned *>(shared_memory());
    const int i = threadIdx.x;
    if (fault == 0) store(y + i, load(x + i));
    if (fault == 1) store(y + i, load(x + i + 1));
    if (fault == 2) store(y + i + 1, load(x + i));
    if (fault == 3) store(y + i, load(reinterpret_cast<const unsigned *>(reinterpret_cast<const char *>(x) + 2)));
    if (fault == 4) store_shared(words + blockDim.x, unsigned(i));
    if (fault == 5) {
        store_shared(words + i, load(x + i));
        store(y + i, load_shared(words + (i ^ 1)));
    }
    if (fault == 6 && i < 32) sync_block();
    if (fault == 7 && i % 32 < 16) sync_warp();
    if (fault == 8) store_shared(words + i, load_shared(words));
    if (fault == 9) copy_async(reinterpret_cast<uint4 *>(words), reinterpret_cast<const uint4 *>(x));
}

// What a launch does that may begin before earlier ones have ended. fault: 1 to 4, before they have.
KERNEL probe_early(const uint4 *x, uint4 *y, int fault) {
    const int i = threadIdx.x;
    uint4 *words = reinterpret_cast<uint4 *>(shared_memory());
    bring_to_cache(x + i + (fault == 5 ? int(blockDim.x) : 0));
    uint4 value = {};
    if (fault == 1) value = load(x + i);
    if (fault == 2) value = load_latest(x + i);
    if (fault == 3) store(y + i, value);
    if (fault == 4) copy_async(words + i, x + i);
    wait_for_earlier();
    let_next_begin();
    value = load_earlier(x + i);
    copy_commit();
    copy_wait<0>();
    store(y + i, value);
}

// Sums over blocks, left in `partial` and added up by the last block. fault: which part of the protocol is left out.
KERNEL probe_join(const float *x, float *partial, unsigned *counter, float *y, int fault) {
    unsigned *last = reinterpret_cast<unsigned *>(shared_memory());
    const int i = threadIdx.x, n = blockDim.x;
    store(partial + blockIdx.x * n + i, load(x + blockIdx.x * n + i));
    if (fault != 1) fence();
    if (fault != 2) sync_block();
    if (i == 0) store_shared(last, unsigned(atomic_add(counter, 1u) == gridDim.x - 1));
    sync_block();
    if (!load_shared(last)) return;
    if (fault != 3) fence();
    float sum = 0.0f;
    for (unsigned block = 0; block < gridDim.x; block++) {
        const float *from = partial + block * n + i;
        sum += fault == 4 ? load(from) : load_latest(from);
    }
    store(y + i, sum);
    if (i == 0 && fault != 5) store(counter, 0u);
}
