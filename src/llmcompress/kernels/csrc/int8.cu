// Products of inputs and weights in int8, summed exactly.
//
// TILE_M tokens by TILE_N channels for each block of WARPS_M x WARPS_N warps, whose inputs come in STAGES tiles of 128.
// BFLOAT: 1 for bfloat16 outputs, 0 for float16.
#include "primitives.cuh"
#include "split.cuh"

#if BFLOAT
typedef Bfloat Float;
#else
typedef Half Float;
#endif

constexpr int TILE_K = 128;  // inputs, and bytes of a row in shared memory
constexpr int CHUNKS = TILE_K / 16;
constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int TILES_M = TILE_M / WARPS_M / 16;     // of a warp, 16 tokens each
constexpr int GROUPS_N = TILE_N / WARPS_N / 32;    // of a warp, 32 channels each, in
constexpr int TILES_N = GROUPS_N * 4;              // of 8
constexpr int STAGE = (TILE_M + TILE_N) * CHUNKS;  // pieces of 16 bytes

// Where piece `chunk` of a row lies: any eight rows that one ldmatrix reads have it in eight different places. Those
// of tokens are neighbours; those of channels are pairs, eight apart, so that a thread ends up with eight in a row.
DEVICE int token_piece(int row, int chunk) { return row * CHUNKS + (chunk ^ (row & 7)); }
DEVICE int channel_piece(int row, int chunk) { return row * CHUNKS + (chunk ^ ((row & 1) | (row >> 2 & 6))); }

// Starts to copy one tile of inputs. Rows after the last token or channel are zeros, and are not stored.
DEVICE void copy_tile(uint4 *stage, const signed char *x, const signed char *weight, int first_token,
                      int first_channel, int tokens, int channels, int padded, int tile) {
    constexpr int AT_ONCE = THREADS / CHUNKS;  // rows
    static_assert(TILE_M % AT_ONCE == 0 && TILE_N % AT_ONCE == 0, "threads copy equally many rows");
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS, at = tile * TILE_K + chunk * 16;
    const size_t step = size_t(AT_ONCE) * padded;
    const signed char *of_x = x + size_t(first_token + first) * padded + at;
    const signed char *of_weight = weight + size_t(first_channel + first) * padded + at;
#pragma unroll
    for (int row = 0; row < TILE_M; row += AT_ONCE, of_x += step) {
        const int bytes = first_token + first + row < tokens ? 16 : 0;
        copy_async(stage + token_piece(first + row, chunk), reinterpret_cast<const uint4 *>(of_x), bytes);
    }
    stage += TILE_M * CHUNKS;
#pragma unroll
    for (int row = 0; row < TILE_N; row += AT_ONCE, of_weight += step) {
        const int bytes = first_channel + first + row < channels ? 16 : 0;
        copy_async(stage + channel_piece(first + row, chunk), reinterpret_cast<const uint4 *>(of_weight), bytes);
    }
}

struct Fragments {
    unsigned x[TILES_M][4];
    unsigned weight[TILES_N][2];
};

// 32 inputs of a stage.
DEVICE void read_fragments(Fragments &into, const uint4 *stage, int warp_m, int warp_n, int step) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        const int token = (warp_m * TILES_M + i) * 16 + matrix % 2 * 8 + row;
        load_matrices(into.x[i], stage + token_piece(token, 2 * step + matrix / 2));
    }
#pragma unroll
    for (int j = 0; j < TILES_N; j += 2) {
        const int tile = j + matrix / 2;
        const int channel = (warp_n * GROUPS_N + tile / 4) * 32 + row / 2 * 8 + tile % 4 * 2 + row % 2;
        unsigned found[4];
        load_matrices(found, stage + TILE_M * CHUNKS + channel_piece(channel, 2 * step + matrix % 2));
        into.weight[j][0] = found[0];
        into.weight[j][1] = found[1];
        into.weight[j + 1][0] = found[2];
        into.weight[j + 1][1] = found[3];
    }
}

// y [tokens, channels] = x weight^T * scales of tokens and channels + bias. x int8 [tokens, padded], weight int8
// [channels, padded], padded a multiple of 128. scales [tokens], weight_scales [channels]; bias [channels] may be null.
KERNEL __launch_bounds__(THREADS)
int8_matmul(const signed char *x, const float *scales, const signed char *weight, const float *weight_scales,
            const float *bias, unsigned short *y, int *partial, unsigned *counters, int tokens, int channels,
            int padded) {
    uint4 *stages = reinterpret_cast<uint4 *>(shared_memory());
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    const int first_token = blockIdx.x * TILE_M, first_channel = blockIdx.y * TILE_N;
    const int all = padded / TILE_K;
    const int begin = int(blockIdx.z * size_t(all) / gridDim.z), end = int((blockIdx.z + 1) * size_t(all) / gridDim.z);

    int sums[TILES_M * TILES_N][4] = {};
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
        if (begin + ahead < end)
            copy_tile(stages + ahead * STAGE, x, weight, first_token, first_channel, tokens, channels, padded,
                      begin + ahead);
        copy_commit();
    }
    int stage = 0;
    for (int tile = begin; tile < end; ++tile) {
        copy_wait<STAGES - 2>();
        sync_block();
        const int free = stage == 0 ? STAGES - 1 : stage - 1;
        if (tile + STAGES - 1 < end)
            copy_tile(stages + free * STAGE, x, weight, first_token, first_channel, tokens, channels, padded,
                      tile + STAGES - 1);
        copy_commit();
        Fragments fragments[2];
        read_fragments(fragments[0], stages + stage * STAGE, warp_m, warp_n, 0);
#pragma unroll
        for (int step = 0; step < TILE_K / 32; ++step) {
            if (step + 1 < TILE_K / 32)
                read_fragments(fragments[(step + 1) % 2], stages + stage * STAGE, warp_m, warp_n, step + 1);
            const Fragments &now = fragments[step % 2];
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
                for (int j = 0; j < TILES_N; ++j) mma_int8(sums[i * TILES_N + j], now.x[i], now.weight[j]);
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copy_wait<0>();
    sync_block();
    if (!whole_sums(sums, threadIdx.x, THREADS, partial, counters)) return;

#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = first_token + (warp_m * TILES_M + i) * 16 + half * 8 + lane / 4;
            if (token >= tokens) continue;
            const float scale = load(scales + token);
#pragma unroll
            for (int group = 0; group < GROUPS_N; ++group) {
                const int channel = first_channel + (warp_n * GROUPS_N + group) * 32 + lane % 4 * 8;
                unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    if (channel + c >= channels) continue;
                    const int sum = sums[i * TILES_N + group * 4 + c / 2][half * 2 + c % 2];
                    float value = float(sum) * scale * load(weight_scales + channel + c);
                    if (bias) value += load(bias + channel + c);
                    words[c / 2] |= unsigned(Float::from_float(value)) << (c % 2 * 16);
                }
                unsigned short *to = y + size_t(token) * channels + channel;
                if (channels % 8 == 0) {
                    uint4 all_words;
                    all_words.x = words[0];
                    all_words.y = words[1];
                    all_words.z = words[2];
                    all_words.w = words[3];
                    if (channel < channels) store(reinterpret_cast<uint4 *>(to), all_words);
                } else {
#pragma unroll
                    for (int c = 0; c < 8; ++c)
                        if (channel + c < channels) store(to + c, (unsigned short)(words[c / 2] >> (c % 2 * 16)));
                }
            }
        }
    }
}
