// What the kernels ask of the hardware, by instruction. Names no toolkit header, so that NVRTC alone compiles it.
//
// Every access to global and shared memory goes through these functions: another definition of them, chosen by
// defining PRIMITIVES_CUH beforehand, runs the same kernels elsewhere and checks each access.
// 16-bit floats are raw bits: unsigned short, two of them in an unsigned, the first one low.
#ifndef PRIMITIVES_CUH
#define PRIMITIVES_CUH

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void

// ---- Memory -------------------------------------------------------------------------------------------------------

// Dynamic shared memory, aligned to 16 bytes.
DEVICE unsigned char *shared_memory() {
    extern __shared__ uint4 words[];
    return reinterpret_cast<unsigned char *>(words);
}

// Global memory that nothing writes while the kernel runs.
template <class T> DEVICE T load(const T *at) { return __ldg(at); }

// The same of what an earlier launch may write until wait_for_earlier(): the compiler leaves it behind that.
template <class T> DEVICE T load_earlier(const T *at) { return *at; }

// Global memory that other blocks may have written, past the L1 cache.
template <class T> DEVICE T load_latest(const T *at) { return __ldcg(at); }

template <class T> DEVICE void store(T *at, T value) { *at = value; }

// The same of what is more than L2 holds: it is the first to leave it.
template <class T> DEVICE void store_passing(T *at, T value) { __stcs(at, value); }

// 16 bytes that are read once: they take no place in L1 and are the first to leave L2.
DEVICE uint4 load_once(const uint4 *at) {
    uint4 v;
    asm volatile("{\n"
                 ".reg .b64 policy;\n"
                 "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
                 "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n"
                 "}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

template <class T> DEVICE T load_shared(const T *at) { return *at; }
template <class T> DEVICE void store_shared(T *at, T value) { *at = value; }

// Adds to global memory; returns what was there.
DEVICE unsigned atomic_add(unsigned *at, unsigned value) { return atomicAdd(at, value); }
DEVICE float atomic_add(float *at, float value) { return atomicAdd(at, value); }

// What this thread wrote to global memory is seen by whoever sees what it writes later.
DEVICE void fence() { __threadfence(); }

DEVICE unsigned shared_address(const void *at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

// Starts a copy of 16 bytes from global to shared memory; of these the first `bytes` are read and the others zero.
DEVICE void copy_async(uint4 *to, const uint4 *from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}
// How long copies stay in L2: they leave first, or as others do.
DEVICE unsigned long long leave_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE unsigned long long leave_as_others() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// As copy_async, only where `active`, and without a branch.
DEVICE void copy_async_if(bool active, uint4 *to, const uint4 *from, int bytes, unsigned long long policy) {
    asm volatile("{\n"
                 ".reg .pred active;\n"
                 "setp.ne.b32 active, %0, 0;\n"
                 "@active cp.async.cg.shared.global.L2::cache_hint [%1], [%2], 16, %3, %4;\n"
                 "}" ::"r"(int(active)),
                 "r"(shared_address(to)), "l"(from), "r"(bytes), "l"(policy)
                 : "memory");
}
// Makes one group of the copies that this thread has started since the last group.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `groups` of this thread's latest groups are under way.
template <int groups> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory"); }

// ---- Launches -----------------------------------------------------------------------------------------------------

// Waits until the launches before this one have ended and what they wrote can be read. In a launch that may begin before
// they have, no thread touches global memory earlier.
DEVICE void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets blocks of the next launch begin wherever there is room for them.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Asks for the 128 bytes around an address to be brought to L2. This is no access: what lies there may yet change.
DEVICE void bring_to_cache(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// ---- Threads ------------------------------------------------------------------------------------------------------

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// Of int, unsigned or float; every lane of the warp takes part.
template <class T> DEVICE T shuffle(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
template <class T> DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
template <class T> DEVICE T shuffle_down(T value, int by) { return __shfl_down_sync(0xffffffffu, value, by); }

// ---- Bits and whole numbers ---------------------------------------------------------------------------------------

// Bitwise function of three words: bit 4a + 2b + c of `table` is the result for bits a, b, c.
template <int table> DEVICE unsigned lop3(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(table));
    return d;
}
// Bytes of (a, b) chosen by nibbles of `selector`: 0 to 3 are a's, 4 to 7 b's; bit 3 repeats the byte's sign.
DEVICE unsigned prmt(unsigned a, unsigned b, unsigned selector) {
    unsigned d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}
// c plus the sum of the products of four signed bytes.
DEVICE int dp4a(int a, int b, int c) { return __dp4a(a, b, c); }
// Nearest whole number, ties to even.
DEVICE int round_even(float x) { return __float2int_rn(x); }
DEVICE unsigned float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(unsigned x) { return __uint_as_float(x); }

// The same number, which the compiler then holds in a register instead of computing it anew wherever it is used.
DEVICE unsigned held(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---- 16-bit floats ------------------------------------------------------------------------------------------------

struct Half {
    static __device__ __forceinline__ float to_float(unsigned short x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    }
    static __device__ __forceinline__ unsigned short from_float(float x) {
        unsigned short y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
    // a * b + c of two pairs, each rounded once.
    static __device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
        unsigned d;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    }
    // d += a b: a is 16 x 16 by rows, b 16 x 8 by columns (PTX ISA, mma.m16n8k16); sums in float32.
    static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    // The same into sums that begin at zero.
    static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%10, %10, %10, %10};"
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
    }
};

struct Bfloat {
    static __device__ __forceinline__ float to_float(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }
    static __device__ __forceinline__ unsigned short from_float(float x) {
        unsigned short y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
    static __device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
        unsigned d;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                     "{%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%10, %10, %10, %10};"
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
    }
};

// ---- Matrices -----------------------------------------------------------------------------------------------------

// d += a b of signed bytes: a is 16 x 32 by rows, b 32 x 8 by columns (PTX ISA, mma.m16n8k32).
DEVICE void mma_int8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b of TF32: a is 16 x 8 by rows, b 8 x 8 by columns (PTX ISA, mma.m16n8k8). Of each float32 the sign, the
// exponent and ten bits of the mantissa count.
DEVICE void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(float_bits(a[0])), "r"(float_bits(a[1])), "r"(float_bits(a[2])), "r"(float_bits(a[3])),
                   "r"(float_bits(b[0])), "r"(float_bits(b[1])));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane 8i + r names row r of matrix i (PTX ISA, ldmatrix).
DEVICE void load_matrices(unsigned (&d)[4], const uint4 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
}

#endif
