// The primitives of csrc/primitives.cuh on a processor: each thread is a fiber, and
// several blocks are under way at once.
//
// Pointers that a kernel gets are not addresses: each access is checked (bounds, alignment, races in shared memory) and
// translated, so one that goes round the primitives faults at once.
#pragma once
#define PRIMITIVES_CUH
#include "hooks.h"

// ---- Memory -------------------------------------------------------------------------------------------------------

DEVICE unsigned char *shared_memory() { return emulator::emulator_shared_base(); }

template <class T> DEVICE T emulator_read(const unsigned char *from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class T> DEVICE T load(const T *at) { return emulator_read<T>(emulator::emulator_constant(at, sizeof(T))); }
template <class T> DEVICE T load_earlier(const T *at) { return load(at); }
template <class T> DEVICE T load_latest(const T *at) {
    T value;
    emulator::emulator_latest(at, sizeof value, &value);
    return value;
}
DEVICE uint4 load_once(const uint4 *at) { return load(at); }
template <class T> DEVICE void store(T *at, T value) { emulator::emulator_store(at, sizeof value, &value); }
template <class T> DEVICE void store_passing(T *at, T value) { store(at, value); }
template <class T> DEVICE T load_shared(const T *at) {
    return emulator_read<T>(emulator::emulator_shared(at, sizeof(T), emulator::READ));
}
template <class T> DEVICE void store_shared(T *at, T value) {
    std::memcpy(emulator::emulator_shared(at, sizeof(T), emulator::WRITE), &value, sizeof value);
}
template <class T> DEVICE T atomic_add(T *at, T value) {
    unsigned char *there = emulator::emulator_atomic(at, sizeof value);
    const T before = emulator_read<T>(there), after = before + value;
    std::memcpy(there, &after, sizeof after);
    return before;
}
DEVICE void fence() { emulator::emulator_fence(); }

DEVICE void copy_async(uint4 *to, const uint4 *from, int bytes = 16) { emulator::emulator_copy(to, from, bytes); }
DEVICE unsigned long long leave_first() { return 1; }
DEVICE unsigned long long leave_as_others() { return 0; }
DEVICE void copy_async_if(bool active, uint4 *to, const uint4 *from, int bytes, unsigned long long) {
    if (active) emulator::emulator_copy(to, from, bytes);
}
DEVICE void copy_commit() { emulator::emulator_copy_commit(); }
template <int groups> DEVICE void copy_wait() { emulator::emulator_copy_wait(groups); }

// ---- Launches -----------------------------------------------------------------------------------------------------

DEVICE void wait_for_earlier() { emulator::emulator_wait_for_earlier(); }
DEVICE void let_next_begin() {}
DEVICE void bring_to_cache(const void *at) { emulator::emulator_bring_to_cache(at); }

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

DEVICE unsigned held(unsigned x) { return x; }

#include "matrices.h"

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
