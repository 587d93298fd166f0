// What the lanes of a warp multiply together: fragments by the tables of the PTX ISA.
#pragma once
#include "floats.h"

namespace emulator {

template <int exponent, int mantissa> struct Float16 {
    static float to_float(unsigned short x) { return decode<exponent, mantissa>(x); }
    static unsigned short from_float(float x) { return encode<exponent, mantissa>(x); }

    static unsigned fma2(unsigned a, unsigned b, unsigned c) {
        unsigned d = 0;
        for (int shift = 0; shift < 32; shift += 16) {
            const double sum = fma_odd(to_float(a >> shift), to_float(b >> shift), to_float(c >> shift));
            d |= unsigned(encode<exponent, mantissa>(sum)) << shift;
        }
        return d;
    }

    struct Operands { float d[4]; unsigned a[4], b[2]; };
    static void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
        Operands in;
        std::memcpy(in.d, d, sizeof d), std::memcpy(in.a, a, sizeof a), std::memcpy(in.b, b, sizeof b);
        emulator_warp(16 + exponent, &in, sizeof in, d, sizeof d, compute);
    }
    static void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
        std::memset(d, 0, sizeof d);
        mma(d, a, b);
    }
    // Row r of a is in lanes 4 (r % 8) + t, its columns 2t, 2t + 1 (+ 8) in words 0 and 2, or 1 and 3 from row 8 on.
    static void compute(const void *in, void *out) {
        const auto *lanes = static_cast<const Operands *>(in);
        auto *sums = static_cast<float(*)[4]>(out);
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int half = 0; half < 2; half++) {
                const int row = lane / 4, column = lane % 4 * 2 + half;
                for (int i = 0; i < 4; i++)
                    a[row + i % 2 * 8][column + i / 2 * 8] = to_float(lanes[lane].a[i] >> 16 * half);
                for (int i = 0; i < 2; i++) b[column + 8 * i][row] = to_float(lanes[lane].b[i] >> 16 * half);
            }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                double sum = lanes[lane].d[i];
                for (int k = 0; k < 16; k++) sum += double(a[lane / 4 + i / 2 * 8][k]) * b[k][lane % 4 * 2 + i % 2];
                sums[lane][i] = cut(sum);
            }
    }
};

}  // namespace emulator

using Half = emulator::Float16<5, 10>;
using Bfloat = emulator::Float16<8, 7>;

struct EmulatorBytes { int d[4]; unsigned a[4], b[2]; };
// Row r of a is in lanes 4 (r % 8) + t, its columns 4t ... 4t + 3 (+ 16) in words 0 and 2, or 1 and 3 from row 8 on.
DEVICE void emulator_multiply_int8(const void *in, void *out) {
    const auto *lanes = static_cast<const EmulatorBytes *>(in);
    auto *sums = static_cast<int(*)[4]>(out);
    int a[16][32], b[32][8];
    for (int lane = 0; lane < 32; lane++)
        for (int byte = 0; byte < 4; byte++) {
            const int row = lane / 4, column = lane % 4 * 4 + byte;
            for (int i = 0; i < 4; i++)
                a[row + i % 2 * 8][column + i / 2 * 16] = int8_t(lanes[lane].a[i] >> 8 * byte);
            for (int i = 0; i < 2; i++) b[column + 16 * i][row] = int8_t(lanes[lane].b[i] >> 8 * byte);
        }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int sum = lanes[lane].d[i];
            for (int k = 0; k < 32; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
            sums[lane][i] = sum;
        }
}
DEVICE void mma_int8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    EmulatorBytes in;
    std::memcpy(in.d, d, sizeof d), std::memcpy(in.a, a, sizeof a), std::memcpy(in.b, b, sizeof b);
    emulator::emulator_warp(2, &in, sizeof in, d, sizeof d, emulator_multiply_int8);
}

struct EmulatorTf32 { float d[4], a[4], b[2]; };
DEVICE double emulator_tf32(float x) { return bits_float(float_bits(x) & 0xffffe000u); }
// Row r of a is in lanes 4 (r % 8) + t, its columns t and t + 4 in words 0 and 2, or 1 and 3 from row 8 on.
DEVICE void emulator_multiply_tf32(const void *in, void *out) {
    const auto *lanes = static_cast<const EmulatorTf32 *>(in);
    auto *sums = static_cast<float(*)[4]>(out);
    double a[16][8], b[8][8];
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = emulator_tf32(lanes[lane].a[i]);
        for (int i = 0; i < 2; i++) b[lane % 4 + 4 * i][lane / 4] = emulator_tf32(lanes[lane].b[i]);
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            double sum = lanes[lane].d[i];
            for (int k = 0; k < 8; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
            sums[lane][i] = emulator::cut(sum);
        }
}
DEVICE void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    EmulatorTf32 in;
    std::memcpy(in.d, d, sizeof d), std::memcpy(in.a, a, sizeof a), std::memcpy(in.b, b, sizeof b);
    emulator::emulator_warp(4, &in, sizeof in, d, sizeof d, emulator_multiply_tf32);
}

// Lane 4r + t gets elements 2t, 2t + 1 of row r of each matrix.
DEVICE void emulator_matrices(const void *in, void *out) {
    const auto *rows = static_cast<const unsigned(*)[4]>(in);
    auto *words = static_cast<unsigned(*)[4]>(out);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) words[lane][i] = rows[8 * i + lane / 4][lane % 4];
}
DEVICE void load_matrices(unsigned (&d)[4], const uint4 *row) {
    const uint4 in = load_shared(row);
    emulator::emulator_warp(3, &in, sizeof in, d, sizeof d, emulator_matrices);
}
