// Products of 16-bit inputs and weights in blocks of GGML's types. Codes are multiplied as they are, exactly; scales go
// to the float32 sums of a group.
//
// 8 * TOKENS tokens for each block of WARPS warps, which share the inputs; STAGES records at once for each warp. BITS,
// BFLOAT as in ggml.cuh.
#include "ggml.cuh"

// The inputs of one token that a lane owns in a chunk: b of two steps.
DEVICE uint4 load_inputs(const unsigned short *row, int chunk) {
    const int t = threadIdx.x % 4;
    if (BITS != 6) return load_earlier(reinterpret_cast<const uint4 *>(row + chunk * 32 + t * 8));
    const uint2 first = load_earlier(reinterpret_cast<const uint2 *>(row + chunk * 32 + t * 4));
    const uint2 last = load_earlier(reinterpret_cast<const uint2 *>(row + chunk * 32 + 16 + t * 4));
    return make_uint4(first.x, first.y, last.x, last.y);
}

// Sums of a token's inputs over groups of 32: lane 4g + t has those of token g in chunks t and t + 4 of a record.
struct GroupSums {
    float of[2];

    // Takes in one of the record's chunks. Half of its inputs are the rows from 8 on of a matrix times ones.
    __device__ __forceinline__ void take(const uint4 &inputs, int chunk) {
        const unsigned one = BFLOAT ? 0x3f803f80u : 0x3c003c00u, ones[2] = {one, one};
        const unsigned halves[4] = {inputs.x, inputs.y, inputs.z, inputs.w};
        float sums[4];
        Float::multiply(sums, halves, ones);
        if (int(threadIdx.x % 4) == chunk % 4) of[chunk / 4] = sums[0] + sums[2];
    }
};

// What the record's two rows of a lane multiply group sums with: bytes of groups t and t + 4, times `factor`.
DEVICE void bytes_of_groups(float (&a)[4], const unsigned *low, const unsigned *high, float factor) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        a[2 * i] = byte_of(low[i], threadIdx.x % 4, 0.0f, factor);
        a[2 * i + 1] = byte_of(high[i], threadIdx.x % 4, 0.0f, factor);
    }
}

// Adds to the sums of 16 channels by 8 tokens those of groups times `bytes`, to 21 bits.
DEVICE void add_of_groups(float (&sums)[4], const float (&bytes)[4], const GroupSums &groups) {
    float high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        high[i] = bits_float(float_bits(groups.of[i]) & 0xffffe000u);
        low[i] = groups.of[i] - high[i];
    }
    mma_tf32(sums, bytes, high);
    mma_tf32(sums, bytes, low);
}

// Adds one record's part to the sums of 8 * TOKENS tokens. own: inputs of a lane's tokens, of which `chunks` are left.
DEVICE void add_products(float (&sums)[TOKENS][4], const Record &record, const unsigned short *const (&own)[TOKENS],
                         int chunks) {
    const Scales low = scales_of(record, 0), high = scales_of(record, 1);
    float parts[TOKENS][4] = {};  // in units of d
    GroupSums groups[TOKENS] = {};
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
        uint4 inputs[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const bool inside = BITS != 8 || chunk < chunks;  // blocks of other types are whole records
            inputs[t] = inside ? load_inputs(own[t], chunk) : make_uint4(0, 0, 0, 0);
        }
        unsigned weights[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            weights[i / 2][i % 2 * 2] = pair_of(record, chunk, 0, i);
            weights[i / 2][i % 2 * 2 + 1] = pair_of(record, chunk, 1, i);
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const unsigned b[2][2] = {{inputs[t].x, inputs[t].y}, {inputs[t].z, inputs[t].w}};
            float products[4];
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                if (BITS == 6 || step == 0)
                    Float::multiply(products, weights[step], b[step]);
                else
                    Float::mma(products, weights[step], b[step]);
                if (BITS != 6 && step == 0) continue;
                const float scales[2] = {multiple_of(low, chunk, step), multiple_of(high, chunk, step)};
#pragma unroll
                for (int i = 0; i < 4; ++i) parts[t][i] = fmaf(scales[i / 2], products[i], parts[t][i]);
            }
            if (MINIMA) groups[t].take(inputs[t], chunk);
        }
    }
    float offsets[4], minima[4];
    if (MINIMA) {
        bytes_of_groups(offsets, low.multiples, high.multiples, -OFFSET);
        bytes_of_groups(minima, low.minima, high.minima, 1.0f);
    }
    constexpr float unit = MINIMA ? 1 << BITS : 1;
    const float units[2] = {unit_of(low) * unit, unit_of(high) * unit};
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float least[4] = {};
        if (MINIMA) {
            add_of_groups(parts[t], offsets, groups[t]);
            add_of_groups(least, minima, groups[t]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[t][i] = fmaf(units[i / 2], parts[t][i], sums[t][i]);
            if (MINIMA) sums[t][i] = fmaf(i < 2 ? -low.dmin : -high.dmin, least[i], sums[t][i]);
        }
    }
}

// Writes sums of 16 channels by 8 * TOKENS tokens, those of the warps added up in their order.
DEVICE void store_sums(const float (&sums)[TOKENS][4], float *of_warps, const float *bias, unsigned short *y,
                       int first_token, int first_channel, int tokens, int channels) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    sync_block();
#pragma unroll
    for (int i = 0; i < TOKENS * 4; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, channel = i % 4 / 2 * 8 + lane / 4;
        store_shared(of_warps + (warp * TOKENS * 8 + token) * 17 + channel, sums[i / 4][i % 4]);
    }
    sync_block();
    for (int i = threadIdx.x; i < TOKENS * 128; i += WARPS * 32) {
        const int token = first_token + i / 16, channel = first_channel + i % 16;
        if (token >= tokens || channel >= channels) continue;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other)
            sum += load_shared(of_warps + (other * TOKENS * 8 + i / 16) * 17 + i % 16);
        if (bias) sum += load_earlier(bias + channel);
        store(y + size_t(token) * channels + channel, Float::from_float(sum));
    }
}

// Starts to copy a record to shared memory, if there is one.
DEVICE void copy_record(bool active, uint4 *to, const uint4 *records, size_t record, unsigned long long policy) {
#pragma unroll
    for (int piece = threadIdx.x % 32; piece < PIECES; piece += 32)
        copy_async_if(active, to + piece, records + record * PIECES + piece, 16, policy);
    copy_commit();
}

// The records of a warp one after another: every WARPS-th of a tile of 16 channels, then those of its block's next tile.
struct Place {
    int tile, at;

    __device__ __forceinline__ void advance(int count) {
        at += WARPS;
        if (at < count) return;
        at = threadIdx.x / 32;
        tile += gridDim.y;
    }
};

// Asks for the first records of a warp to be brought to the cache.
DEVICE void bring_first_records(Place place, const uint4 *records, int count, int tiles) {
    for (int ahead = 0; ahead < STAGES && place.tile < tiles; ++ahead) {
        const uint4 *record = records + (size_t(place.tile) * count + place.at) * PIECES;
        for (int piece = threadIdx.x % 32 * 8; piece < PIECES; piece += 32 * 8) bring_to_cache(record + piece);
        place.advance(count);
    }
}

// y [tokens, channels] = x weight^T + bias. x [tokens, width] in rows of `stride` elements, a multiple of 8; width a
// multiple of 32; records [ceil(channels / 16), ceil(width / 256)]; bias [channels] may be null. Block (x, y) takes
// every gridDim.y-th 16 channels from y on. Each warp has STAGES records of its own in shared memory.
KERNEL __launch_bounds__(WARPS * 32, 3 - TOKENS)
ggml_matmul(const unsigned short *x, const uint4 *records, const float *bias, unsigned short *y, int tokens, int channels,
            int width, int stride) {
    const int warp = threadIdx.x / 32, first_token = blockIdx.x * TOKENS * 8;
    const int count = (width + 255) / 256, tiles = (channels + 15) / 16;
    uint4 *stages = reinterpret_cast<uint4 *>(shared_memory()) + warp * STAGES * PIECES;
    float *of_warps = reinterpret_cast<float *>(shared_memory() + WARPS * STAGES * PIECES * 16);
    const unsigned long long policy = leave_first();
    const unsigned short *rows[TOKENS];  // of a lane's tokens; of the last one where there are fewer, whose sums stay here
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
        rows[t] = x + size_t(min(first_token + t * 8 + int(threadIdx.x % 32 / 4), tokens - 1)) * stride;
    Place ahead = {warp < count ? int(blockIdx.y) : tiles, warp};
    bring_first_records(ahead, records, count, tiles);
    wait_for_earlier();
    let_next_begin();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        copy_record(ahead.tile < tiles, stages + stage * PIECES, records, size_t(ahead.tile) * count + ahead.at, policy);
        ahead.advance(count);
    }
    int stage = 0;
    for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        float sums[TOKENS][4] = {};
        for (int at = warp; at < count; at += WARPS) {
            copy_wait<STAGES - 2>();
            sync_warp();
            uint4 *free = stages + (stage == 0 ? STAGES - 1 : stage - 1) * PIECES;
            copy_record(ahead.tile < tiles, free, records, size_t(ahead.tile) * count + ahead.at, policy);
            ahead.advance(count);
            const unsigned short *own[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) own[t] = rows[t] + at * 256;
            add_products(sums, read_record<true>(stages + stage * PIECES), own, width / 32 - at * 8);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        store_sums(sums, of_warps, bias, y, first_token, tile * 16, tokens, channels);
    }
    copy_wait<0>();
}
