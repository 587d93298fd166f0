// Values of weights in blocks of GGML's types. WIDE: 1 for float32 values. BITS, BFLOAT as in ggml.cuh.
#include "ggml.cuh"

#if WIDE
typedef float Value;
#else
typedef unsigned short Value;
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
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const unsigned pair = pair_of(record, chunk, half, j / 2);
                const float level = Float::to_float((unsigned short)(pair >> (16 * (j % 2))));
                float value = scale_of(scales, chunk, j / 4) * level;
                if (MINIMA) value -= minimum_of(scales, chunk);
                const int input = BITS == 6 ? j / 4 * 16 + lane % 4 * 4 + j % 4 : lane % 4 * 8 + j;
                Value *to = values + size_t(channel) * width + (at * 8 + chunk) * 32 + input;
#if WIDE
                store(to, value);
#else
                store(to, Float::from_float(value));
#endif
            }
        }
    }
}
