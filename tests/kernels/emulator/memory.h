// Global memory, as weakly ordered as a GPU's may be: what a thread stores reaches other blocks after a fence and no
// earlier, and what a thread reads is as old as its own latest fence allows.
#pragma once
#include <unordered_map>
#include <vector>

#include "hooks.h"

namespace emulator {

class Memory {
  public:
    // What a block's threads have stored and no other block sees yet, and since when each thread is up to date.
    struct Block {
        struct Own { unsigned char data[16]; unsigned mask, pending; };
        struct Store { uint64_t place; unsigned char data[16]; unsigned mask; };
        std::unordered_map<uint64_t, Own> own;          // by place; this block sees it at once
        std::unordered_map<uint64_t, uint64_t> touched;  // by place: time of this block's latest atomic operation
        std::vector<std::vector<Store>> of_threads;      // since the latest barrier
        std::vector<Store> settled;                      // before it: a fence of any thread of the block is one for these
        std::vector<uint64_t> seen;
    };

    void begin_launch() { now = 0, history.clear(), written.clear(), waiting.clear(); }
    Block begin_block(unsigned threads) const {
        Block block;
        block.of_threads.resize(threads), block.seen.assign(threads, 0);
        return block;
    }
    // Stores that no fence has sent on reach memory when the launch ends.
    void end_block(Block &block) {
        barrier(block);
        waiting.insert(waiting.end(), block.settled.begin(), block.settled.end());
    }
    void end_launch() {
        for (const Block::Store &store : waiting) write(store);
    }

    // Whether something of it was stored during this launch: then it may not be read as memory that nothing writes.
    bool is_written(uint64_t address, unsigned bytes) const {
        const auto found = written.find(address / 16);
        return found != written.end() && found->second & mask_of(address, bytes);
    }

    void store(Block &block, unsigned thread, uint64_t address, unsigned bytes, const void *value) {
        Block::Store store{address / 16, {}, mask_of(address, bytes)};
        std::memcpy(store.data + address % 16, value, bytes);
        block.of_threads[thread].push_back(store);
        Block::Own &own = block.own[store.place];
        own.pending++, own.mask |= store.mask;
        std::memcpy(own.data + address % 16, value, bytes);
        written[store.place] |= store.mask;
    }

    // The oldest value that the thread may see.
    void read(const Block &block, unsigned thread, uint64_t address, unsigned bytes, void *value) const {
        const uint64_t place = address / 16;
        unsigned char data[16];
        std::memcpy(data + address % 16, reinterpret_cast<const void *>(address), bytes);
        const auto touched = block.touched.find(place);
        const uint64_t since = max(block.seen[thread], touched == block.touched.end() ? 0 : touched->second);
        if (const auto versions = history.find(place); versions != history.end())
            for (const Version &version : versions->second)
                if (version.until > since) {
                    std::memcpy(data, version.data, 16);
                    break;
                }
        if (const auto own = block.own.find(place); own != block.own.end())
            for (unsigned i = 0; i < 16; i++)
                if (own->second.mask >> i & 1) data[i] = own->second.data[i];
        std::memcpy(value, data + address % 16, bytes);
    }

    // Makes way for an atomic operation, which happens in memory itself.
    void touch(Block &block, unsigned thread, uint64_t address, unsigned bytes) {
        const uint64_t place = address / 16;
        send(block, block.of_threads[thread], place), send(block, block.settled, place);
        remember(place);
        block.touched[place] = now;
        written[place] |= mask_of(address, bytes);
    }

    void fence(Block &block, unsigned thread) {
        send(block, block.of_threads[thread], ANYWHERE), send(block, block.settled, ANYWHERE);
        block.seen[thread] = now;
    }

    void barrier(Block &block) {
        uint64_t latest = 0;
        for (uint64_t seen : block.seen) latest = max(latest, seen);
        block.seen.assign(block.seen.size(), latest);
        for (auto &stores : block.of_threads) {
            block.settled.insert(block.settled.end(), stores.begin(), stores.end());
            stores.clear();
        }
    }

  private:
    struct Version { uint64_t until; unsigned char data[16]; };
    static constexpr uint64_t ANYWHERE = ~0ull;
    uint64_t now = 0;
    std::unordered_map<uint64_t, std::vector<Version>> history;
    std::unordered_map<uint64_t, unsigned> written;
    std::vector<Block::Store> waiting;

    static unsigned mask_of(uint64_t address, unsigned bytes) { return ((1u << bytes) - 1) << address % 16; }

    void remember(uint64_t place) {
        Version version{++now, {}};
        std::memcpy(version.data, reinterpret_cast<const void *>(place * 16), 16);
        history[place].push_back(version);
    }
    void write(const Block::Store &store) {
        remember(store.place);
        for (unsigned i = 0; i < 16; i++)
            if (store.mask >> i & 1) reinterpret_cast<unsigned char *>(store.place * 16)[i] = store.data[i];
    }
    // Lets stores to one place, or all, reach memory.
    void send(Block &block, std::vector<Block::Store> &stores, uint64_t place) {
        std::vector<Block::Store> others;
        for (const Block::Store &store : stores) {
            if (place != ANYWHERE && place != store.place) {
                others.push_back(store);
                continue;
            }
            write(store);
            if (auto own = block.own.find(store.place); !--own->second.pending) block.own.erase(own);
        }
        stores.swap(others);
    }
};

}  // namespace emulator
