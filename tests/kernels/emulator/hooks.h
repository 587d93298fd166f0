// CUDA's words and types, and what the scheduler does for a thread.
#pragma once
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
// Global memory at a kernel's pointer, each access checked; a failed check ends the launch.
extern "C" const unsigned char *emulator_constant(const void *pointer, unsigned bytes);  // that nothing writes
extern "C" void emulator_latest(const void *pointer, unsigned bytes, void *value);
extern "C" void emulator_store(void *pointer, unsigned bytes, const void *value);
extern "C" unsigned char *emulator_atomic(void *pointer, unsigned bytes);  // to be changed at once
extern "C" void emulator_fence();
extern "C" unsigned char *emulator_shared(const void *pointer, unsigned bytes, Access access);
extern "C" unsigned char *emulator_shared_base();
extern "C" [[noreturn]] void emulator_fail(const char *message);

// All lanes of a warp come here with the same `kind`; the last computes from all inputs, lane after lane, all outputs.
using Compute = void (*)(const void *in, void *out);
extern "C" void emulator_warp(unsigned kind, const void *in, unsigned in_bytes, void *out, unsigned out_bytes,
                              Compute compute);
extern "C" void emulator_sync_block();
extern "C" void emulator_wait_for_earlier();
extern "C" void emulator_bring_to_cache(const void *pointer);  // which lies within a tensor
extern "C" void emulator_copy(void *to, const void *from, int bytes);
extern "C" void emulator_copy_commit();
extern "C" void emulator_copy_wait(int groups);

}  // namespace emulator

#define threadIdx emulator::emulator_place.thread
#define blockIdx emulator::emulator_place.block
#define blockDim emulator::emulator_place.block_size
#define gridDim emulator::emulator_place.grid_size
