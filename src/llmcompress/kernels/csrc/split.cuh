// Blocks that share a tile of the output, each with the sums of some of the inputs.
#ifndef SPLIT_CUH
#define SPLIT_CUH

#include "primitives.cuh"

// Adds up the sums of the blocks (x, y, 0 ... gridDim.z - 1) in the order of z. Every thread of a block calls it, with
// shared memory at rest; those with slot < slots have sums. partial holds 4 * fragments * slots numbers for each block.
// counters, one for each (x, y), are zero before and after. True in the one block of a tile that has the whole sums.
template <class T, int fragments>
DEVICE bool whole_sums(T (&sums)[fragments][4], int slot, int slots, T *partial, unsigned *counters) {
    if (gridDim.z == 1) return true;
    const int tile = blockIdx.y * gridDim.x + blockIdx.x;
    const size_t stride = size_t(4 * fragments) * slots;
    T *of_tile = partial + tile * gridDim.z * stride + slot;
    if (slot < slots) {
#pragma unroll
        for (int i = 0; i < 4 * fragments; ++i) store(of_tile + blockIdx.z * stride + i * slots, sums[i / 4][i % 4]);
    }
    fence();
    sync_block();
    unsigned *before = reinterpret_cast<unsigned *>(shared_memory());
    if (threadIdx.x == 0) store_shared(before, atomic_add(counters + tile, 1u));
    sync_block();
    if (load_shared(before) != gridDim.z - 1) return false;
    fence();
    if (threadIdx.x == 0) store(counters + tile, 0u);
    if (slot < slots) {
#pragma unroll
        for (int i = 0; i < 4 * fragments; ++i) sums[i / 4][i % 4] = T(0);
        for (unsigned z = 0; z < gridDim.z; ++z) {
#pragma unroll
            for (int i = 0; i < 4 * fragments; ++i)
                sums[i / 4][i % 4] += load_latest(of_tile + z * stride + i * slots);
        }
    }
    return true;
}

#endif
