// Values of weights in blocks of GGML's types. WIDE: 1 for float32 values. BITS, BFLOAT as in ggml.cuh.
#include "ggml.cuh"

constexpr int RUN = BITS == 6 ? 4 : 8;  // neighbouring values that a lane has

// Writes a run of values, in pieces as wide as it allows.
#if WIDE
typedef float Value;
DEVICE void store_run(float *to, const float *values) {
#pragma unroll
    for (int i = 0; i < RUN; i += 4)
        store_passing(reinterpret_cast<float4 *>(to + i), make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]));
}
#else
typedef unsigned short Value;
DEVICE void store_run(unsigned short *to, const float *values) {
    unsigned pairs[RUN / 2];
#pragma unroll
    for (int i = 0; i < RUN / 2; ++i)
        pairs[i] = Float::from_float(values[2 * i]) | unsigned(Float::from_float(values[2 * i + 1])) << 16;
    if (RUN == 8)
        store_passing(reinterpret_cast<uint4 *>(to), make_uint4(pairs[0], pairs[1], pairs[RUN / 2 - 2], pairs[RUN / 2 - 1]));
    else
        store_passing(reinterpret_cast<uint2 *>(to), make_uint2(pairs[0], pairs[1]));
}
#endif

// A warp for each record: values [channels, width], scale * level - minimum in float32, rounded once.
KERNEL ggml_values(const uint4 *records, Value *values, int channels, int width) {
    const int lane = threadIdx.x % 32, count = (width + 255) / 256;
    const int at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (at >= count) return;
    const Record record = read_record<false>(records + (size_t(blockIdx.y) * count + at) * PIECES);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int channel = blockIdx.y * 16 + half * 8 + lane / 4;
        const Scales scales = scales_of(record, half);
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            if (channel >= channels || at * 8 + chunk >= width / 32) continue;
            float own[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const unsigned pair = pair_of(record, chunk, half, j / 2);
                const float scale = multiple_of(scales, chunk, j / 4) * unit_of(scales);
                own[j] = scale * level_of((unsigned short)(pair >> (16 * (j % 2))));
                if (MINIMA) own[j] -= byte_of(scales.minima[chunk / 4], chunk % 4) * scales.dmin;
            }
            Value *to = values + size_t(channel) * width + (at * 8 + chunk) * 32 + lane % 4 * RUN;
#pragma unroll
            for (int run = 0; run < 8 / RUN; ++run) store_run(to + run * 16, own + run * RUN);
        }
    }
}
