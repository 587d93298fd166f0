// Runs a grid: blocks in a shuffled order, some at once, whose threads are fibers that take turns at random wherever one
// waits for others or deals with other blocks.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "memory.h"
#include "races.h"

using namespace emulator;

namespace {

constexpr uint64_t GLOBAL = 1ull << 60, SHARED = 1ull << 61;  // added to addresses: not canonical, so they fault
constexpr size_t STACK = 128 << 10;
constexpr unsigned MOST_SHARED = 227 << 10, MOST_THREADS = 1024, MOST_RESIDENT = 4;

struct Range { uint64_t begin, bytes; };
struct Copy { unsigned char *to; const unsigned char *from; int bytes; };
enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    State state;
    bool begun;
    bool alone;  // earlier launches have ended, as far as the thread can know
    jmp_buf at;
    ucontext_t first;
    void *out;                             // of the operation of the warp that is under way
    std::vector<std::vector<Copy>> groups;  // committed and not yet waited for
    std::vector<Copy> copies;               // not yet committed
};
struct Warp {
    unsigned arrived, kind, epoch;
    std::vector<unsigned char> in;
};
// A block that is under way, or the place for one.
struct Block {
    Index index;
    unsigned left = 0, waiting, epoch = 0;  // threads that have not ended; that wait for all others; barriers passed
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<unsigned> ready;
    std::vector<unsigned char> stacks, shared_memory;
    unsigned char *shared;
    Races races{MOST_SHARED};
    Memory::Block memory;
};
std::vector<Block> blocks(MOST_RESIDENT);
Block *block;      // of the running fiber
unsigned running;  // the fiber's number in it
Memory memory;
std::vector<Range> ranges;
unsigned shared_bytes, overlapping;  // whether the launch may begin before earlier ones have ended
jmp_buf scheduler;
std::string failure;
std::mt19937 order;
void (*kernel)(const uint64_t *);
const uint64_t *values;

[[noreturn]] void fail(const char *format, ...) {
    char text[512];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    const Place &p = emulator_place;
    char where[128];
    snprintf(where, sizeof where, "block (%u, %u, %u) thread (%u, %u, %u): ", p.block.x, p.block.y, p.block.z, p.thread.x,
             p.thread.y, p.thread.z);
    failure = std::string(where) + text;
    _longjmp(scheduler, 2);
}

// Leaves the running fiber until it is ready again.
void leave(State state) {
    Fiber &fiber = block->fibers[running];
    fiber.state = state;
    if (state == READY) block->ready.push_back(running);
    if (!_setjmp(fiber.at)) _longjmp(scheduler, 1);
}

void begin() {
    kernel(values);
    Fiber &fiber = block->fibers[running];
    fiber.state = DONE;
    fiber.groups.push_back(fiber.copies);
    for (const auto &group : fiber.groups)
        if (!group.empty()) fail("ends with copies under way");
    _longjmp(scheduler, 1);
}

void enter(Block &of, unsigned thread) {
    block = &of, running = thread;
    const Index size = emulator_place.block_size;
    emulator_place.block = of.index;
    emulator_place.thread = {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
    if (_setjmp(scheduler)) return;
    Fiber &fiber = of.fibers[thread];
    if (fiber.begun) _longjmp(fiber.at, 1);
    fiber.begun = true;
    setcontext(&fiber.first);
}

void make_ready(unsigned first, unsigned count, State from) {
    for (unsigned thread = first; thread < first + count; thread++)
        if (block->fibers[thread].state == from && thread != running)
            block->fibers[thread].state = READY, block->ready.push_back(thread);
}

void start(Block &one, Index index, unsigned count) {
    block = &one;
    one.index = index, one.left = count, one.waiting = 0;
    one.shared_memory.resize(MOST_SHARED + 1024);
    one.shared = one.shared_memory.data() + (1024 - reinterpret_cast<uintptr_t>(one.shared_memory.data()) % 1024);
    std::fill(one.shared, one.shared + shared_bytes, 0xff);
    one.epoch++;
    one.memory = memory.begin_block(count);
    one.ready.clear();
    one.fibers.assign(count, Fiber{});
    one.warps.assign(count / 32, Warp{});
    one.stacks.resize(STACK * count);
    for (unsigned thread = 0; thread < count; thread++) {
        ucontext_t &context = one.fibers[thread].first;
        getcontext(&context);
        context.uc_stack.ss_sp = one.stacks.data() + STACK * thread;
        context.uc_stack.ss_size = STACK;
        context.uc_link = nullptr;
        makecontext(&context, begin, 0);
    }
    running = count;
    make_ready(0, count, READY);
}

// Runs all blocks, so many at once; one of them goes on for a while, on average `stretch` turns, before another does.
void run_blocks(std::vector<Index> left, unsigned count, unsigned at_once, unsigned stretch) {
    for (Block &one : blocks) one.left = 0, one.ready.clear();
    Block *favoured = nullptr;
    for (;;) {
        std::vector<Block *> able;
        unsigned under_way = 0;
        for (unsigned i = 0; i < at_once; i++) {
            if (!blocks[i].left && !left.empty()) start(blocks[i], left.back(), count), left.pop_back();
            under_way += blocks[i].left > 0;
            if (!blocks[i].ready.empty()) able.push_back(&blocks[i]);
        }
        if (!under_way) return memory.end_launch();
        if (able.empty()) {
            failure = "threads wait for others that have gone another way (barrier or warp operation not met by all)";
            return;
        }
        if (std::find(able.begin(), able.end(), favoured) == able.end() || order() % stretch == 0)
            favoured = able[order() % able.size()];
        Block &one = *favoured;
        std::swap(one.ready[order() % one.ready.size()], one.ready.back());
        const unsigned thread = one.ready.back();
        one.ready.pop_back();
        enter(one, thread);
        if (!failure.empty()) return;
        if (one.fibers[thread].state == DONE && !--one.left) memory.end_block(one.memory);
    }
}

void note(unsigned first, unsigned bytes, Access access) {
    const Moment now{block->epoch, block->warps[running / 32].epoch, running};
    for (unsigned i = first; i < first + bytes; i++)
        if (const char *race = block->races.note(i, access, now)) fail("shared byte %u: %s", i, race);
}

void finish(const std::vector<Copy> &copies) {
    for (const Copy &copy : copies) {
        std::memset(copy.to, 0, 16);
        std::memcpy(copy.to, copy.from, copy.bytes);
        note(copy.to - block->shared, 16, WRITE);
    }
}

// The real address of a kernel's pointer to global memory.
uint64_t global(const void *pointer, unsigned bytes, const char *what) {
    if (overlapping && !block->fibers[running].alone) fail("global %s before earlier launches have ended", what);
    const uint64_t address = reinterpret_cast<uint64_t>(pointer) - GLOBAL;
    if (address % bytes) fail("global access of %u bytes is not aligned", bytes);
    for (const Range &range : ranges)
        if (address >= range.begin && address + bytes <= range.begin + range.bytes) return address;
    fail("global %s of %u bytes lies outside of every tensor", what, bytes);
}

}  // namespace

namespace emulator {
extern "C" {

Place emulator_place;

const unsigned char *emulator_constant(const void *pointer, unsigned bytes) {
    const uint64_t address = global(pointer, bytes, "read");
    if (memory.is_written(address, bytes)) fail("global memory that the launch writes is read as if nothing wrote it");
    return reinterpret_cast<const unsigned char *>(address);
}

void emulator_latest(const void *pointer, unsigned bytes, void *value) {
    memory.read(block->memory, running, global(pointer, bytes, "read"), bytes, value);
}

void emulator_store(void *pointer, unsigned bytes, const void *value) {
    memory.store(block->memory, running, global(pointer, bytes, "write"), bytes, value);
}

unsigned char *emulator_atomic(void *pointer, unsigned bytes) {
    const uint64_t address = global(pointer, bytes, "write");
    leave(READY);
    memory.touch(block->memory, running, address, bytes);
    return reinterpret_cast<unsigned char *>(address);
}

void emulator_fence() {
    memory.fence(block->memory, running);
    leave(READY);
}

unsigned char *emulator_shared_base() { return reinterpret_cast<unsigned char *>(SHARED); }

unsigned char *emulator_shared(const void *pointer, unsigned bytes, Access access) {
    const uint64_t at = reinterpret_cast<uint64_t>(pointer) - SHARED;
    if (at % bytes) fail("shared access of %u bytes is not aligned", bytes);
    if (at + bytes > shared_bytes) fail("shared access beyond the %u bytes asked for", shared_bytes);
    note(at, bytes, access);
    return block->shared + at;
}

void emulator_fail(const char *message) { fail("%s", message); }

void emulator_warp(unsigned kind, const void *in, unsigned in_bytes, void *out, unsigned out_bytes, Compute compute) {
    Warp &warp = block->warps[running / 32];
    if (warp.arrived && warp.kind != kind) fail("lanes of a warp are at different operations");
    warp.kind = kind;
    warp.in.resize(32 * in_bytes);
    if (in_bytes) std::memcpy(warp.in.data() + running % 32 * in_bytes, in, in_bytes);
    block->fibers[running].out = out;
    if (++warp.arrived < 32) return leave(AT_WARP);
    warp.arrived = 0;
    const unsigned first = running / 32 * 32;
    if (compute) {
        alignas(16) unsigned char results[32 * 64];
        compute(warp.in.data(), results);
        for (unsigned lane = 0; lane < 32; lane++)
            std::memcpy(block->fibers[first + lane].out, results + lane * out_bytes, out_bytes);
    } else {
        warp.epoch++;
    }
    make_ready(first, 32, AT_WARP);
}

void emulator_sync_block() {
    if (++block->waiting < block->fibers.size()) return leave(AT_BLOCK);
    block->waiting = 0;
    block->epoch++;
    memory.barrier(block->memory);
    make_ready(0, block->fibers.size(), AT_BLOCK);
}

void emulator_wait_for_earlier() { block->fibers[running].alone = true; }

void emulator_bring_to_cache(const void *pointer) {
    const uint64_t address = reinterpret_cast<uint64_t>(pointer) - GLOBAL;
    for (const Range &range : ranges)
        if (address >= range.begin && address < range.begin + range.bytes) return;
    fail("what is brought to the cache lies outside of every tensor");
}

// The copy is made as late as may be, when it is waited for, so that whoever reads too early finds what was there.
void emulator_copy(void *to, const void *from, int bytes) {
    if (bytes < 0 || bytes > 16) fail("a copy of %d bytes", bytes);
    if (reinterpret_cast<uint64_t>(from) % 16) fail("global access of 16 bytes is not aligned");
    unsigned char *target = emulator_shared(to, 16, WRITE);
    std::memset(target, 0xff, 16);
    const unsigned char *source = reinterpret_cast<const unsigned char *>(from) - GLOBAL;
    for (int part = 0; part < bytes; part++) emulator_constant(static_cast<const char *>(from) + part, 1);
    block->fibers[running].copies.push_back({target, source, bytes});
}

void emulator_copy_commit() {
    Fiber &fiber = block->fibers[running];
    fiber.groups.push_back(fiber.copies);
    fiber.copies.clear();
}

void emulator_copy_wait(int groups) {
    auto &mine = block->fibers[running].groups;
    while (mine.size() > size_t(groups)) {
        finish(mine.front());
        mine.erase(mine.begin());
    }
}

// tensors: address and bytes of each. sizes: grid, then block. overlaps: whether earlier launches may not have ended.
// Returns what went wrong, or an empty text.
const char *emulator_run(void (*call)(const uint64_t *), const uint64_t *arguments, const char *kinds,
                         const uint64_t *tensors, unsigned tensor_count, const unsigned *sizes, unsigned bytes,
                         unsigned seed, unsigned overlaps) {
    const Index grid{sizes[0], sizes[1], sizes[2]}, size{sizes[3], sizes[4], sizes[5]};
    const unsigned count = size.x * size.y * size.z;
    failure.clear();
    if (count % 32 || count == 0 || count > MOST_THREADS) return "blocks have 32 to 1024 threads, in whole warps";
    if (bytes > MOST_SHARED) return "more than 227 KB of shared memory";
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) return "a grid that no device takes";
    ranges.clear();
    for (unsigned i = 0; i < tensor_count; i++) ranges.push_back({tensors[2 * i], tensors[2 * i + 1]});
    std::vector<uint64_t> given(arguments, arguments + std::strlen(kinds));
    for (size_t i = 0; i < given.size(); i++)
        if (kinds[i] == 'p' && given[i]) given[i] += GLOBAL;
    kernel = call, values = given.data(), shared_bytes = bytes, overlapping = overlaps;
    emulator_place.block_size = size, emulator_place.grid_size = grid;
    order.seed(seed);
    std::vector<Index> all;
    for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) all.push_back({i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y});
    std::shuffle(all.begin(), all.end(), order);
    memory.begin_launch();
    const unsigned at_once = 1 + order() % MOST_RESIDENT, stretch = 1u << order() % 10;
    run_blocks(all, count, at_once, stretch);
    if (!failure.empty()) return failure.c_str();
    return "";
}
}
}  // namespace emulator
