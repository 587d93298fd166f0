// Accesses of shared memory that no barrier keeps apart.
#pragma once
#include <vector>

#include "hooks.h"

namespace emulator {

// When something happens: barriers that the block and the warp have passed, and the thread that does it.
struct Moment {
    unsigned block, warp, thread;
    bool apart_from(const Moment &later) const {
        return block != later.block || thread == later.thread || (thread / 32 == later.thread / 32 && warp != later.warp);
    }
};

class Races {
  public:
    explicit Races(unsigned bytes) : seen(bytes) {}

    // Notes an access of a byte; says what it races with, or null.
    const char *note(unsigned at, Access access, Moment now) {
        Seen &byte = seen[at];
        if (!byte.write.apart_from(now)) return access == READ ? "read races with a write" : "write races with a write";
        if (access == READ) {
            note_read(byte, now);
            return nullptr;
        }
        const bool several = byte.several_warps || (byte.several_lanes && byte.read.warp == now.warp);
        if (byte.read.block == now.block && (several || !byte.read.apart_from(now))) return "write races with a read";
        byte.write = now;
        return nullptr;
    }

  private:
    struct Seen {
        Moment write, read;                 // the latest ones
        bool several_warps, several_lanes;  // have read it since the barrier of the block, of the warp
    };
    std::vector<Seen> seen;

    static void note_read(Seen &byte, Moment now) {
        const bool since = byte.read.block == now.block, same_warp = byte.read.thread / 32 == now.thread / 32;
        byte.several_warps = since && (byte.several_warps || !same_warp);
        byte.several_lanes = since && same_warp && byte.read.warp == now.warp &&
                             (byte.several_lanes || byte.read.thread != now.thread);
        byte.read = now;
    }
};

}  // namespace emulator
