// Products of 16-bit inputs and weights in blocks of GGML's types. Codes are multiplied as they are, exactly; scales go
// to the float32 sums of a group.
//
// 8 * TOKENS tokens by 16 channels for each block of WARPS warps, which share the inputs. BITS, BFLOAT as in ggml.cuh.
#include "ggml.cuh"

// The inputs of one token that a lane owns in a chunk: b of two steps.
DEVICE uint4 load_inputs(const unsigned short *row, int chunk) {
    const int t = threadIdx.x % 4;
    if (BITS != 6) return load(reinterpret_cast<const uint4 *>(row + chunk * 32 + t * 8));
    const uint2 first = load(reinterpret_cast<const uint2 *>(row + chunk * 32 + t * 4));
    const uint2 last = load(reinterpret_cast<const uint2 *>(row + chunk * 32 + 16 + t * 4));
    return make_uint4(first.x, first.y, last.x, last.y);
}

// y [tokens, channels] = x weight^T + bias. x [tokens, width] in rows of `stride` elements, a multiple of 8; width a
// multiple of 32; records [ceil(channels / 16), ceil(width / 256)]; bias [channels] may be null.
KERNEL __launch_bounds__(WARPS * 32, 3 - TOKENS)
ggml_matmul(const unsigned short *x, const uint4 *records, const float *bias, unsigned short *y, int tokens, int channels,
            int width, int stride) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_token = blockIdx.x * TOKENS * 8, count = (width + 255) / 256, chunks = width / 32;
    const unsigned one = BFLOAT ? 0x3f803f80u : 0x3c003c00u, ones[4] = {one, one, one, one};
    const unsigned short *own = x + size_t(first_token + lane / 4) * stride;
    float sums[TOKENS][4] = {};
    Record next;
    if (warp < count) fetch(next, records, size_t(blockIdx.y) * count + warp);
    for (int at = warp; at < count; at += WARPS) {
        const Record now = next;
        if (at + WARPS < count) fetch(next, records, size_t(blockIdx.y) * count + at + WARPS);
        const Scales low = scales_of(now, 0), high = scales_of(now, 1);
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            uint4 inputs[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const bool inside = first_token + t * 8 + lane / 4 < tokens && at * 8 + chunk < chunks;
                inputs[t] = inside ? load_inputs(own + size_t(t) * 8 * stride, at * 8 + chunk) : make_uint4(0, 0, 0, 0);
            }
            unsigned weights[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                weights[i / 2][i % 2 * 2] = pair_of(now, chunk, 0, i);
                weights[i / 2][i % 2 * 2 + 1] = pair_of(now, chunk, 1, i);
            }
            float least[2] = {0.0f, 0.0f};
            if (MINIMA) {
                least[0] = minimum_of(low, chunk);
                least[1] = minimum_of(high, chunk);
            }
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const unsigned b[2][2] = {{inputs[t].x, inputs[t].y}, {inputs[t].z, inputs[t].w}};
                float products[4] = {}, of_inputs[4] = {};
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    Float::mma(products, weights[step], b[step]);
                    if (MINIMA) Float::mma(of_inputs, ones, b[step]);
                    if (BITS != 6 && step == 0) continue;
                    const float scales[2] = {scale_of(low, chunk, step), scale_of(high, chunk, step)};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sums[t][i] = fmaf(scales[i / 2], products[i], sums[t][i]);
                        if (MINIMA) sums[t][i] = fmaf(-least[i / 2], of_inputs[i], sums[t][i]);
                        products[i] = 0.0f;
                    }
                }
            }
        }
    }

    // every warp's sums of 16 channels by 8 * TOKENS tokens; each is then added up in the order of warps
    float *of_warps = reinterpret_cast<float *>(shared_memory());
#pragma unroll
    for (int i = 0; i < TOKENS * 4; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, channel = i % 4 / 2 * 8 + lane / 4;
        store_shared(of_warps + (warp * TOKENS * 8 + token) * 17 + channel, sums[i / 4][i % 4]);
    }
    sync_block();
    for (int i = threadIdx.x; i < TOKENS * 128; i += WARPS * 32) {
        const int token = i / 16, channel = blockIdx.y * 16 + i % 16;
        if (first_token + token >= tokens || channel >= channels) continue;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other)
            sum += load_shared(of_warps + (other * TOKENS * 8 + token) * 17 + i % 16);
        if (bias) sum += load(bias + channel);
        store(y + size_t(first_token + token) * channels + channel, Float::from_float(sum));
    }
}
