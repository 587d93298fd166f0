// The primitives of csrc/primitives.cuh on a processor: each thread of a block is a fiber, blocks run one by one.
//
// Pointers that a kernel gets are not addresses: each access is checked (bounds, alignment, races in shared memory)
// and translated by `at`, so one that goes round the primitives faults at once.
#pragma once
#define PRIMITIVES_CUH

#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) alignas(n)
#define DEVICE static inline
#define KERNEL extern "C" void

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

namespace emulator {

struct Index { unsigned x, y, z; };
struct Place { Index thread, block, block_size, grid_size; };

// Where the running thread is; set at each switch.
extern "C" Place emulator_place;

enum Access { READ, WRITE };
// The real address of `bytes` bytes at a kernel's pointer, checked; a failed check ends the launch.
extern "C" unsigned char *emulator_global(const void *pointer, unsigned bytes, Access access);
extern "C" unsigned char *emulator_shared(const void *pointer, unsigned bytes, Access access);
extern "C" unsigned char *emulator_shared_base();
extern "C" [[noreturn]] void emulator_fail(const char *message);

// All lanes of a warp come here with the same `kind`; the last computes from all inputs, lane after lane, all outputs.
using Compute = void (*)(const void *in, void *out);
extern "C" void emulator_warp(unsigned kind, const void *in, unsigned in_bytes, void *out, unsigned out_bytes,
                              Compute compute);
extern "C" void emulator_sync_block();
extern "C" void emulator_copy(void *to, const void *from, int bytes);
extern "C" void emulator_copy_commit();
extern "C" void emulator_copy_wait(int groups);

// A number rounded to even in a binary format of 1 + exponent + mantissa bits; infinite beyond its range.
template <int exponent, int mantissa> static inline unsigned short encode(double x) {
    const int bias = (1 << (exponent - 1)) - 1;
    const unsigned short sign = std::signbit(x) ? 0x8000 : 0, infinite = ((1 << exponent) - 1) << mantissa;
    if (std::isnan(x)) return 0x7fff;
    if (std::isinf(x)) return sign | infinite;
    const double size = std::fabs(x);
    int power;
    std::frexp(size, &power);
    power = power - 1 < 1 - bias ? 1 - bias : power - 1;
    if (size == 0 || power > bias) return sign | (size == 0 ? 0 : infinite);
    const auto steps = static_cast<unsigned>(std::nearbyint(std::ldexp(size, mantissa - power)));
    const unsigned bits = steps + (unsigned(power + bias - 1) << mantissa);  // a carry moves into the exponent
    return sign | (bits > infinite ? infinite : bits);
}

template <int exponent, int mantissa> static inline float decode(unsigned short x) {
    const int bias = (1 << (exponent - 1)) - 1, field = (x & 0x7fff) >> mantissa, rest = x & ((1 << mantissa) - 1);
    double size = field ? std::ldexp(rest + (1 << mantissa), field - bias - mantissa)
                        : std::ldexp(rest, 1 - bias - mantissa);
    if (field == (1 << exponent) - 1) size = rest ? NAN : INFINITY;
    return static_cast<float>(x & 0x8000 ? -size : size);
}

// a * b + c in double, the product exact and the sum rounded to odd: rounding it again gives the same as rounding once.
static inline double fma_odd(double a, double b, double c) {
    const double product = a * b, sum = product + c, part = sum - product;
    const double error = (product - (sum - part)) + (c - part);
    if (error == 0 || !std::isfinite(sum)) return sum;
    int64_t bits;
    std::memcpy(&bits, &sum, 8);
    if (!(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
    double odd;
    std::memcpy(&odd, &bits, 8);
    return odd;
}

// Tensor cores cut off what does not fit instead of rounding it.
static inline float cut(double x) {
    const float y = static_cast<float>(x);
    return std::isfinite(y) && std::fabs(y) > std::fabs(x) ? std::nextafterf(y, 0.0f) : y;
}

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
        emulator_warp(16 + exponent, &in, sizeof in, d, sizeof d, multiply);
    }
    // Row r of a is in lanes 4 (r % 8) + t, its columns 2t, 2t + 1 (+ 8) in words 0 and 2, or 1 and 3 from row 8 on.
    static void multiply(const void *in, void *out) {
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

#define threadIdx emulator::emulator_place.thread
#define blockIdx emulator::emulator_place.block
#define blockDim emulator::emulator_place.block_size
#define gridDim emulator::emulator_place.grid_size

using Half = emulator::Float16<5, 10>;
using Bfloat = emulator::Float16<8, 7>;

// ---- Memory -------------------------------------------------------------------------------------------------------

DEVICE unsigned char *shared_memory() { return emulator::emulator_shared_base(); }

template <class T> DEVICE T emulator_read(const unsigned char *from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class T> DEVICE T load(const T *at) {
    return emulator_read<T>(emulator::emulator_global(at, sizeof(T), emulator::READ));
}
template <class T> DEVICE T load_latest(const T *at) { return load(at); }
DEVICE uint4 load_once(const uint4 *at) { return load(at); }
template <class T> DEVICE void store(T *at, T value) {
    std::memcpy(emulator::emulator_global(at, sizeof(T), emulator::WRITE), &value, sizeof value);
}
template <class T> DEVICE T load_shared(const T *at) {
    return emulator_read<T>(emulator::emulator_shared(at, sizeof(T), emulator::READ));
}
template <class T> DEVICE void store_shared(T *at, T value) {
    std::memcpy(emulator::emulator_shared(at, sizeof(T), emulator::WRITE), &value, sizeof value);
}
template <class T> DEVICE T atomic_add(T *at, T value) {
    const T before = load(at);
    store(at, T(before + value));
    return before;
}
DEVICE void fence() {}

DEVICE void copy_async(uint4 *to, const uint4 *from, int bytes = 16) { emulator::emulator_copy(to, from, bytes); }
DEVICE unsigned long long leave_first() { return 1; }
DEVICE unsigned long long leave_as_others() { return 0; }
DEVICE void copy_async_if(bool active, uint4 *to, const uint4 *from, int bytes, unsigned long long) {
    if (active) emulator::emulator_copy(to, from, bytes);
}
DEVICE void copy_commit() { emulator::emulator_copy_commit(); }
template <int groups> DEVICE void copy_wait() { emulator::emulator_copy_wait(groups); }

// ---- Threads ------------------------------------------------------------------------------------------------------

DEVICE void sync_block() { emulator::emulator_sync_block(); }
DEVICE void sync_warp() { emulator::emulator_warp(0, nullptr, 0, nullptr, 0, nullptr); }

template <class T> struct EmulatorShuffle { T value; int lane; };
template <class T> DEVICE void emulator_shuffle(const void *in, void *out) {
    const auto *lanes = static_cast<const EmulatorShuffle<T> *>(in);
    for (int lane = 0; lane < 32; lane++) static_cast<T *>(out)[lane] = lanes[lanes[lane].lane].value;
}
template <class T> DEVICE T shuffle(T value, int lane) {
    static_assert(sizeof(T) == 4, "shuffles move 32 bits");
    const EmulatorShuffle<T> in{value, lane & 31};
    T out;
    emulator::emulator_warp(1, &in, sizeof in, &out, sizeof out, emulator_shuffle<T>);
    return out;
}
template <class T> DEVICE T shuffle_xor(T value, int mask) { return shuffle(value, int(threadIdx.x % 32) ^ mask); }
template <class T> DEVICE T shuffle_down(T value, int by) {
    const int lane = threadIdx.x % 32;
    return shuffle(value, lane + by < 32 ? lane + by : lane);
}

// ---- Bits and whole numbers ---------------------------------------------------------------------------------------

template <int table> DEVICE unsigned lop3(unsigned a, unsigned b, unsigned c) {
    unsigned d = 0;
    for (int bits = 0; bits < 8; bits++)
        if (table >> bits & 1) d |= (bits & 4 ? a : ~a) & (bits & 2 ? b : ~b) & (bits & 1 ? c : ~c);
    return d;
}
DEVICE unsigned prmt(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = uint64_t(b) << 32 | a;
    unsigned d = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned choice = selector >> 4 * i & 15;
        const unsigned byte = both >> 8 * (choice & 7) & 255;
        d |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return d;
}
DEVICE int dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += int(int8_t(a >> 8 * i)) * int8_t(b >> 8 * i);
    return c;
}
DEVICE int round_even(float x) { return int(std::nearbyint(x)); }
DEVICE unsigned float_bits(float x) {
    unsigned y;
    std::memcpy(&y, &x, 4);
    return y;
}
DEVICE float bits_float(unsigned x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}

// ---- Matrices -----------------------------------------------------------------------------------------------------

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

// ---- Launching ----------------------------------------------------------------------------------------------------

namespace emulator {

template <class T> struct Kind { static const char letter = 'i'; };
template <> struct Kind<float> { static const char letter = 'f'; };
template <class T> struct Kind<T *> { static const char letter = 'p'; };

// The kernel's arguments, as one letter each: p a pointer, i 32 bits of a whole number, f a float.
template <class... T> static inline const char *kinds(void (*)(T...)) {
    static const char letters[] = {Kind<T>::letter..., 0};
    static_assert(((sizeof(T) == (Kind<T>::letter == 'p' ? 8 : 4)) && ...), "arguments are pointers, int or float");
    return letters;
}

template <class T> static inline T argument(const uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <class... T> struct Sequence {
    template <int... i> struct At {};
    template <int n, int... i> struct Make : Make<n - 1, n - 1, i...> {};
    template <int... i> struct Make<0, i...> { using type = At<i...>; };
    template <int... i> static void call(void (*kernel)(T...), const uint64_t *values, At<i...>) {
        kernel(argument<T>(values[i])...);
    }
};
template <class... T> static inline void call(void (*kernel)(T...), const uint64_t *values) {
    using Indices = typename Sequence<T...>::template Make<sizeof...(T)>::type;
    Sequence<T...>::call(kernel, values, Indices{});
}

}  // namespace emulator

// The wrapped source ends with this, once for each of its kernels.
#define EMULATE(kernel)                                                                                              \
    extern "C" const char *emulator_kinds_##kernel() { return emulator::kinds(kernel); }                             \
    extern "C" void emulator_call_##kernel(const uint64_t *values) { emulator::call(kernel, values); }
