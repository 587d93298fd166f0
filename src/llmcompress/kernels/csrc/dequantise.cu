// Tiles (weights.cuh) to a dense matrix: (code - zero point) * scale in float32, rounded once.
//
// A warp decodes one block of 32 outputs x 128 inputs. grid.x: blocks of inputs, in fours; grid.y: of outputs.
#include "weights.cuh"

constexpr int WARPS = 4;

// Two numbers times a scale, as two numbers.
DEVICE unsigned scaled(unsigned pair, float scale) {
    const unsigned first = Number::from_float(Number::to_float(pair & 0xffff) * scale);
    return first | unsigned(Number::from_float(Number::to_float(pair >> 16) * scale)) << 16;
}

// w [n, k], rows one after another and the first on 16 bytes.
KERNEL __launch_bounds__(32 * WARPS)
    dequantise(const uint4 *codes, const uint4 *scales, const uint4 *zeros, unsigned short *w, int n, int k) {
    const int blocks = (k + BLOCK_INPUTS - 1) / BLOCK_INPUTS, block = blockIdx.x * WARPS + threadIdx.x / 32;
    if (block >= blocks) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const long long at = (long long)blockIdx.y * blocks + block;
    unsigned words[LANE_WORDS];
#pragma unroll
    for (int i = 0; i < BITS; i++) {
        const uint4 four = load_once(codes + at * (BITS * 32) + 32 * i + lane);
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int part = 0; part < BLOCK_INPUTS / 32; part++) {
        const long long group = at * BLOCK_GROUPS + part * 32 / GROUP;
        float scale[4];
        scales_of(load(reinterpret_cast<const ScaleBits *>(scales) + group * 8 + g), scale);
        const long long own = at * BLOCK_ZEROS + zero_at(part, lane);
        const unsigned zero = ZERO < 0 ? load(reinterpret_cast<const unsigned *>(zeros) + own * 8 + g) : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned *unit = words + (part / 2 * 2 + i / 2) * BITS;
            const Offset offset = offset_of(zero, i);
            unsigned four[4];
#pragma unroll
            for (int pair = 0; pair < 4; pair++)
                four[pair] = scaled(pair_of(unit, 8 * (part % 2) + 2 * pair + i % 2, offset), scale[i]);
            const int row = blockIdx.y * BLOCK_OUTPUTS + 8 * i + g, column = block * BLOCK_INPUTS + 32 * part + 8 * t;
            unsigned short *to = w + (long long)row * k + column;
            if (row < n && column < k && k % 8 == 0)
                store(reinterpret_cast<uint4 *>(to), make_uint4(four[0], four[1], four[2], four[3]));
            else if (row < n)
#pragma unroll
                for (int e = 0; e < 8; e++)
                    if (column + e < k) store(to + e, (unsigned short)(four[e / 2] >> 16 * (e % 2)));
        }
    }
}
