// Inputs as codes int8 with one scale for each token, or one for all, as grids/inputs.py has them.
//
// BFLOAT: 1 for bfloat16, 0 for float16. FIXED: 1 for one scale of all inputs.
#include "primitives.cuh"

#if BFLOAT
typedef Bfloat Float;
#else
typedef Half Float;
#endif

// The greatest value of all threads, in every thread. Shared memory: 4 bytes for each warp.
DEVICE unsigned over_block(unsigned value) {
    unsigned *of_warps = reinterpret_cast<unsigned *>(shared_memory());
#pragma unroll
    for (int by = 16; by > 0; by /= 2) value = max(value, shuffle_xor(value, by));
    sync_block();
    if (threadIdx.x % 32 == 0) store_shared(of_warps + threadIdx.x / 32, value);
    sync_block();
    value = load_shared(of_warps);
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = max(value, load_shared(of_warps + warp));
    return value;
}

// Values at ... at + 7 of a row, zeros after its end. whole: rows begin at multiples of 16 bytes.
DEVICE void read(float (&values)[8], const unsigned short *row, int at, int width, int whole) {
    if (whole && at + 8 <= width) {
        const uint4 raw = load(reinterpret_cast<const uint4 *>(row + at));
        const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = Float::to_float((unsigned short)(words[i / 2] >> (i % 2 * 16)));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = at + i < width ? Float::to_float(load(row + at + i)) : 0.0f;
    }
}

// A block for each token: codes int8 [tokens, padded] of x [tokens, width], zeros after width, and scales [tokens].
// stride: elements from row to row of x. given: the scale, where it is FIXED. padded is a multiple of 8. The scale of a
// token with a NaN is NaN, which no code can say.
KERNEL quantise(const unsigned short *x, const float *given, signed char *codes, float *scales, int width, int stride,
                int padded, int whole) {
    const unsigned short *row = x + size_t(blockIdx.x) * stride;
    const int begin = threadIdx.x * 8, step = blockDim.x * 8;
    float values[8];
    unsigned most = 0;  // bits of magnitudes, which ascend as these do; NaN is the greatest
    for (int at = begin; at < width; at += step) {
        read(values, row, at, width, whole);
#pragma unroll
        for (int i = 0; i < 8; ++i) most = max(most, float_bits(values[i]) & 0x7fffffff);
    }
    const float reach = bits_float(over_block(most));
#if FIXED
    const float scale = reach == reach ? load(given) : reach;
#else
    const float scale = (reach < 1e-5f ? 1e-5f : reach) / 127.5f;  // half a step is clipped
#endif
    if (threadIdx.x == 0) store(scales + blockIdx.x, scale);
    for (int at = begin; at < padded; at += step) {
        read(values, row, at, width, whole);
        unsigned words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int code = max(-128, min(127, round_even(values[i] / scale)));
            words[i / 4] |= (unsigned(code) & 0xff) << (i % 4 * 8);
        }
        uint2 both;
        both.x = words[0];
        both.y = words[1];
        store(reinterpret_cast<uint2 *>(codes + size_t(blockIdx.x) * padded + at), both);
    }
}
