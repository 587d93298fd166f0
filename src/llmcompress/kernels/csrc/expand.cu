// Weights in progressive groups to whole numbers int8, for int8.cu. GROUP as in progressive.cuh.
#include "progressive.cuh"

// A warp for each tile: whole numbers int8 [channels, width].
KERNEL progressive_expand(const uint4 *codes, const unsigned *groups, signed char *to, int channels, int width) {
    const int lane = threadIdx.x % 32, tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (tile >= width / 64) return;
    unsigned fragments[2][4];
    const uint4 own = load_once(codes + (size_t(blockIdx.y) * (width / 64) + tile) * 32 + lane);
    expand_tile(fragments, own, load_group(groups, blockIdx.y, tile, width));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int channel = blockIdx.y * 16 + half * 8 + lane / 4;
        if (channel >= channels) continue;
        signed char *at = to + size_t(channel) * width + tile * 64 + lane % 4 * 16;
        store(reinterpret_cast<uint4 *>(at), make_uint4(fragments[0][half], fragments[0][half + 2],
                                                        fragments[1][half], fragments[1][half + 2]));
    }
}
