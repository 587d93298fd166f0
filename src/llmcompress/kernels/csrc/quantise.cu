// Inputs as codes int8 with one scale for each token, or one for all, as grids/inputs.py has them.
//
// BFLOAT: 1 for bfloat16, 0 for float16. NORM: 1 to normalise (RMS) first. FIXED: 1 for one scale of all inputs.
#include "primitives.cuh"

#if BFLOAT
typedef Bfloat Float;
#else
typedef Half Float;
#endif

// The joined values of all threads, in every thread. Shared memory: 4 bytes for each warp.
template <class Join, class T> DEVICE T over_block(T value) {
    T *of_warps = reinterpret_cast<T *>(shared_memory());
#pragma unroll
    for (int by = 16; by > 0; by /= 2) value = Join::join(value, shuffle_xor(value, by));
    sync_block();
    if (threadIdx.x % 32 == 0) store_shared(of_warps + threadIdx.x / 32, value);
    sync_block();
    value = load_shared(of_warps);
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = Join::join(value, load_shared(of_warps + warp));
    return value;
}
struct Sum {
    static __device__ __forceinline__ float join(float a, float b) { return a + b; }
};
// Of the bits of floats that are not negative, which ascend as these do; NaN is the greatest.
struct Greatest {
    static __device__ __forceinline__ unsigned join(unsigned a, unsigned b) { return a > b ? a : b; }
};

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

// What is rounded: the inputs, or gamma times the inputs over their root mean square, each product rounded to 16 bits.
DEVICE void read_rounded(float (&values)[8], const unsigned short *row, const unsigned short *gamma, float inverse,
                            int at, int width, int whole) {
    read(values, row, at, width, whole);
#if NORM
    float factors[8];
    read(factors, gamma, at, width, whole);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float normal = Float::to_float(Float::from_float(values[i] * inverse));
        values[i] = Float::to_float(Float::from_float(factors[i] * normal));
    }
#endif
}

// A block for each token: codes int8 [tokens, padded] of x [tokens, width], zeros after width, and scales [tokens].
// stride: elements from row to row of x. given: the scale, where it is FIXED. gamma [width], epsilon: where there is a
// NORM. padded is a multiple of 8.
KERNEL quantise(const unsigned short *x, const unsigned short *gamma, const float *given, signed char *codes,
                float *scales, int width, int stride, int padded, int whole, float epsilon) {
    const unsigned short *row = x + size_t(blockIdx.x) * stride;
    const int begin = threadIdx.x * 8, step = blockDim.x * 8;
    float values[8], inverse = 1.0f;
#if NORM
    float squares = 0.0f;
    for (int at = begin; at < width; at += step) {
        read(values, row, at, width, whole);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(values[i], values[i], squares);
    }
    inverse = 1.0f / sqrtf(over_block<Sum>(squares) / width + epsilon);
#endif
#if FIXED
    const float scale = load(given);
#else
    unsigned most = 0;
    for (int at = begin; at < width; at += step) {
        read_rounded(values, row, gamma, inverse, at, width, whole);
#pragma unroll
        for (int i = 0; i < 8; ++i) most = Greatest::join(most, float_bits(values[i]) & 0x7fffffff);
    }
    const float reach = bits_float(over_block<Greatest>(most));
    const float scale = (reach < 1e-5f ? 1e-5f : reach) / 127.5f;  // half a step is clipped
    if (threadIdx.x == 0) store(scales + blockIdx.x, scale);
#endif
    for (int at = begin; at < padded; at += step) {
        read_rounded(values, row, gamma, inverse, at, width, whole);
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
