// Runs a grid: blocks one after another in a shuffled order, the threads of a block as fibers in a shuffled order.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "races.h"

using namespace emulator;

namespace {

constexpr uint64_t GLOBAL = 1ull << 60, SHARED = 1ull << 61;  // added to addresses: not canonical, so they fault
constexpr size_t STACK = 128 << 10;
constexpr unsigned MOST_SHARED = 227 << 10, MOST_THREADS = 1024;

struct Range { uint64_t begin, bytes; };
struct Copy { unsigned char *to; const unsigned char *from; int bytes; };
enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    State state;
    bool begun;
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
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<unsigned char> stacks;
std::deque<unsigned> ready;
std::vector<Range> ranges;
Races shared_races(MOST_SHARED);
alignas(1024) unsigned char shared[MOST_SHARED];
unsigned shared_bytes, running, waiting_for_block, epoch;
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
    fibers[running].state = state;
    if (!_setjmp(fibers[running].at)) _longjmp(scheduler, 1);
}

void begin() {
    kernel(values);
    fibers[running].state = DONE;
    fibers[running].groups.push_back(fibers[running].copies);
    for (const auto &group : fibers[running].groups)
        if (!group.empty()) fail("ends with copies under way");
    _longjmp(scheduler, 1);
}

void enter(unsigned thread) {
    running = thread;
    const Index size = emulator_place.block_size;
    emulator_place.thread = {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
    if (_setjmp(scheduler)) return;
    Fiber &fiber = fibers[thread];
    if (fiber.begun) _longjmp(fiber.at, 1);
    fiber.begun = true;
    setcontext(&fiber.first);
}

void make_ready(unsigned first, unsigned count, State from) {
    std::vector<unsigned> threads;
    for (unsigned thread = first; thread < first + count; thread++)
        if (fibers[thread].state == from && thread != running) threads.push_back(thread);
    std::shuffle(threads.begin(), threads.end(), order);
    for (unsigned thread : threads) fibers[thread].state = READY, ready.push_back(thread);
}

void start_threads(unsigned count) {
    fibers.assign(count, Fiber{});
    warps.assign(count / 32, Warp{});
    stacks.resize(STACK * count);
    for (unsigned thread = 0; thread < count; thread++) {
        ucontext_t &context = fibers[thread].first;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks.data() + STACK * thread;
        context.uc_stack.ss_size = STACK;
        context.uc_link = nullptr;
        makecontext(&context, begin, 0);
    }
    running = count;
    waiting_for_block = 0;
    make_ready(0, count, READY);
}

void run_block(unsigned count) {
    std::fill(shared, shared + shared_bytes, 0xff);
    epoch++;
    start_threads(count);
    unsigned left = count;
    while (!ready.empty()) {
        const unsigned thread = ready.front();
        ready.pop_front();
        enter(thread);
        if (!failure.empty()) return;
        left -= fibers[thread].state == DONE;
    }
    if (left) failure = "threads wait for others that have gone another way (barrier or warp operation not met by all)";
}

void note(unsigned first, unsigned bytes, Access access) {
    const Moment now{epoch, warps[running / 32].epoch, running};
    for (unsigned i = first; i < first + bytes; i++)
        if (const char *race = shared_races.note(i, access, now)) fail("shared byte %u: %s", i, race);
}

void finish(const std::vector<Copy> &copies) {
    for (const Copy &copy : copies) {
        std::memset(copy.to, 0, 16);
        std::memcpy(copy.to, copy.from, copy.bytes);
        note(copy.to - shared, 16, WRITE);
    }
}

}  // namespace

namespace emulator {
extern "C" {

Place emulator_place;

unsigned char *emulator_global(const void *pointer, unsigned bytes, Access access) {
    const uint64_t address = reinterpret_cast<uint64_t>(pointer) - GLOBAL;
    if (address % bytes) fail("global access of %u bytes is not aligned", bytes);
    for (const Range &range : ranges)
        if (address >= range.begin && address + bytes <= range.begin + range.bytes)
            return reinterpret_cast<unsigned char *>(address);
    fail("global %s of %u bytes lies outside of every tensor", access == READ ? "read" : "write", bytes);
}

unsigned char *emulator_shared_base() { return reinterpret_cast<unsigned char *>(SHARED); }

unsigned char *emulator_shared(const void *pointer, unsigned bytes, Access access) {
    const uint64_t at = reinterpret_cast<uint64_t>(pointer) - SHARED;
    if (at % bytes) fail("shared access of %u bytes is not aligned", bytes);
    if (at + bytes > shared_bytes) fail("shared access beyond the %u bytes asked for", shared_bytes);
    note(at, bytes, access);
    return shared + at;
}

void emulator_fail(const char *message) { fail("%s", message); }

void emulator_warp(unsigned kind, const void *in, unsigned in_bytes, void *out, unsigned out_bytes, Compute compute) {
    Warp &warp = warps[running / 32];
    if (warp.arrived && warp.kind != kind) fail("lanes of a warp are at different operations");
    warp.kind = kind;
    warp.in.resize(32 * in_bytes);
    if (in_bytes) std::memcpy(warp.in.data() + running % 32 * in_bytes, in, in_bytes);
    fibers[running].out = out;
    if (++warp.arrived < 32) return leave(AT_WARP);
    warp.arrived = 0;
    const unsigned first = running / 32 * 32;
    if (compute) {
        alignas(16) unsigned char results[32 * 64];
        compute(warp.in.data(), results);
        for (unsigned lane = 0; lane < 32; lane++)
            std::memcpy(fibers[first + lane].out, results + lane * out_bytes, out_bytes);
    } else {
        warp.epoch++;
    }
    make_ready(first, 32, AT_WARP);
}

void emulator_sync_block() {
    if (++waiting_for_block < fibers.size()) return leave(AT_BLOCK);
    waiting_for_block = 0;
    epoch++;
    make_ready(0, fibers.size(), AT_BLOCK);
}

// The copy is made as late as may be, when it is waited for, so that whoever reads too early finds what was there.
void emulator_copy(void *to, const void *from, int bytes) {
    if (bytes < 0 || bytes > 16) fail("a copy of %d bytes", bytes);
    if (reinterpret_cast<uint64_t>(from) % 16) fail("global access of 16 bytes is not aligned");
    unsigned char *target = emulator_shared(to, 16, WRITE);
    std::memset(target, 0xff, 16);
    const unsigned char *source = reinterpret_cast<const unsigned char *>(from) - GLOBAL;
    for (int part = 0; part < bytes; part++) emulator_global(static_cast<const char *>(from) + part, 1, READ);
    fibers[running].copies.push_back({target, source, bytes});
}

void emulator_copy_commit() {
    fibers[running].groups.push_back(fibers[running].copies);
    fibers[running].copies.clear();
}

void emulator_copy_wait(int groups) {
    auto &mine = fibers[running].groups;
    while (mine.size() > size_t(groups)) {
        finish(mine.front());
        mine.erase(mine.begin());
    }
}

// tensors: address and bytes of each. sizes: grid, then block. Returns what went wrong, or an empty text.
const char *emulator_run(void (*call)(const uint64_t *), const uint64_t *arguments, const char *kinds,
                         const uint64_t *tensors, unsigned tensor_count, const unsigned *sizes, unsigned bytes,
                         unsigned seed) {
    const Index grid{sizes[0], sizes[1], sizes[2]}, block{sizes[3], sizes[4], sizes[5]};
    const unsigned count = block.x * block.y * block.z;
    failure.clear();
    ready.clear();
    if (count % 32 || count == 0 || count > MOST_THREADS) return "blocks have 32 to 1024 threads, in whole warps";
    if (bytes > MOST_SHARED) return "more than 227 KB of shared memory";
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) return "a grid that no device takes";
    ranges.clear();
    for (unsigned i = 0; i < tensor_count; i++) ranges.push_back({tensors[2 * i], tensors[2 * i + 1]});
    std::vector<uint64_t> given(arguments, arguments + std::strlen(kinds));
    for (size_t i = 0; i < given.size(); i++)
        if (kinds[i] == 'p' && given[i]) given[i] += GLOBAL;
    kernel = call, values = given.data(), shared_bytes = bytes;
    emulator_place.block_size = block, emulator_place.grid_size = grid;
    order.seed(seed);
    std::vector<unsigned> blocks(grid.x * grid.y * grid.z);
    for (unsigned i = 0; i < blocks.size(); i++) blocks[i] = i;
    std::shuffle(blocks.begin(), blocks.end(), order);
    for (unsigned i : blocks) {
        emulator_place.block = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        run_block(count);
        if (!failure.empty()) return failure.c_str();
    }
    return "";
}
}
}  // namespace emulator
