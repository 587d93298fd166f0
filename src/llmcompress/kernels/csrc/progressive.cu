// Products of int8 inputs and weights in progressive groups.
//
// 8 * TOKENS tokens by 16 * CHANNELS * WARPS_N channels for each block; WARPS_K warps share the inputs. GROUP as in
// progressive.cuh. BFLOAT: 1 for bfloat16 outputs, 0 for float16.
#include "progressive.cuh"
#include "split.cuh"

#if BFLOAT
typedef Bfloat Float;
#else
typedef Half Float;
#endif

constexpr int THREADS = WARPS_N * WARPS_K * 32;
constexpr int TILES = 4 / CHANNELS;  // of 64 inputs, fetched at once for each 16 channels
constexpr int FRAGMENTS = CHANNELS * TOKENS;

struct Fetched {
    uint4 codes[CHANNELS][TILES];
    unsigned groups[CHANNELS][TILES];
};

// Tiles first ... first + TILES - 1; zeros after `end` and after the last channel.
DEVICE void fetch(Fetched &into, const uint4 *codes, const unsigned *groups, int channel_tile, int channel_tiles,
                  int first, int end, int width) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const bool inside = first + i < end && channel_tile + c < channel_tiles;
            const size_t tile = size_t(channel_tile + c) * (width / 64) + first + i;
            into.codes[c][i] = inside ? load_once(codes + tile * 32 + threadIdx.x % 32) : make_uint4(0, 0, 0, 0);
            into.groups[c][i] = inside ? load_group(groups, channel_tile + c, first + i, width) : 0;
        }
    }
}

// y [tokens, channels] = x weight^T * scales of tokens and channels + bias. x int8 [tokens, width], width a multiple
// of 128. scales [tokens], weight_scales [channels]; bias [channels] may be null.
KERNEL __launch_bounds__(THREADS)
progressive_matmul(const signed char *x, const float *scales, const uint4 *codes, const unsigned *groups,
                   const float *weight_scales, const float *bias, unsigned short *y, int *partial, unsigned *counters,
                   int tokens, int channels, int width) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int channel_tile = (blockIdx.y * WARPS_N + warp_n) * CHANNELS, channel_tiles = (channels + 15) / 16;
    const int first_token = blockIdx.x * TOKENS * 8, steps = (width / 64 + TILES - 1) / TILES;
    const int begin = int(blockIdx.z * size_t(steps) / gridDim.z);
    const int end = int((blockIdx.z + 1) * size_t(steps) / gridDim.z), last = min(end * TILES, width / 64);
    const signed char *own = x + size_t(first_token + lane / 4) * width + lane % 4 * 16;

    int sums[FRAGMENTS][4] = {};
    Fetched next;
    fetch(next, codes, groups, channel_tile, channel_tiles, (begin + warp_k) * TILES, last, width);
    for (int step = begin + warp_k; step < end; step += WARPS_K) {
        const Fetched now = next;
        fetch(next, codes, groups, channel_tile, channel_tiles, (step + WARPS_K) * TILES, last, width);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int tile = step * TILES + i;
            unsigned inputs[TOKENS][4];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const bool inside = first_token + t * 8 + lane / 4 < tokens && tile < last;
                const uint4 raw = inside ? load(reinterpret_cast<const uint4 *>(own + size_t(t) * 8 * width + tile * 64))
                                         : make_uint4(0, 0, 0, 0);
                inputs[t][0] = raw.x;
                inputs[t][1] = raw.y;
                inputs[t][2] = raw.z;
                inputs[t][3] = raw.w;
            }
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                unsigned weights[2][4];
                expand_tile(weights, now.codes[c][i], now.groups[c][i]);
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        const unsigned b[2] = {inputs[t][2 * k], inputs[t][2 * k + 1]};
                        mma_int8(sums[c * TOKENS + t], weights[k], b);
                    }
                }
            }
        }
    }

    // the first warp of each set of channels adds up those of the others
    constexpr int SLOTS = WARPS_N * 32, COUNT = FRAGMENTS * 4;
    const int slot = warp_n * 32 + lane;
    int *of_warps = reinterpret_cast<int *>(shared_memory());
    if (warp_k > 0) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            store_shared(of_warps + ((warp_k - 1) * COUNT + i) * SLOTS + slot, sums[i / 4][i % 4]);
    }
    sync_block();
    if (warp_k == 0) {
        for (int other = 0; other < WARPS_K - 1; ++other) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                sums[i / 4][i % 4] += load_shared(of_warps + (other * COUNT + i) * SLOTS + slot);
        }
    }
    sync_block();
    if (!whole_sums(sums, threadIdx.x, SLOTS, partial, counters) || warp_k > 0) return;

#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int channel = (channel_tile + c) * 16 + half * 8 + lane / 4;
            if (channel >= channels) continue;
            const float weight_scale = load(weight_scales + channel), added = bias ? load(bias + channel) : 0.0f;
#pragma unroll
            for (int i = 0; i < TOKENS * 2; ++i) {
                const int token = first_token + i / 2 * 8 + lane % 4 * 2 + i % 2;
                if (token >= tokens) continue;
                const float scale = load(scales + token);
                const float value = float(sums[c * TOKENS + i / 2][half * 2 + i % 2]) * scale * weight_scale + added;
                store(y + size_t(token) * channels + channel, Float::from_float(value));
            }
        }
    }
}
