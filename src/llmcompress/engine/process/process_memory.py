"""What a process uses, and how it gets and gives back memory."""

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LARGEST = 32 << 20  # bytes: glibc takes no larger threshold
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's mallopt


def peak_memory() -> int:
    """Most memory that this process has had for itself so far, in bytes.

    On Linux that is without the files it maps, which are the code of libraries: the kernel shares these pages, drops
    them at need, and maps more or fewer of them with each start. Elsewhere it is the largest resident set.
    """
    try:  # getrusage would also count the process that started this one
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
        return sizes["VmHWM"] - sizes["RssFile"]
    except (OSError, KeyError):
        pass
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def peak_device_memory() -> int | None:
    """Most memory that tensors have had on the accelerator so far, in bytes; None where there is none."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def keep_freed_memory(most: int = 4 << 20) -> None:
    """Have glibc keep freed memory for the next tensor instead of asking the system for each anew.

    By default every large tensor is mapped on its own, and touching its pages for the first time costs a third of a
    run; and each thread has a heap of its own. Does nothing elsewhere. most: bytes of the tensors whose memory is kept,
    at most 32 MB: the larger they are, the more of the heap lies in holes that are too small for others.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if option is not None:
        option(_MMAP_THRESHOLD, most)
        option(_TRIM_THRESHOLD, 1 << 30)
        option(_ARENA_MAX, 1)


@contextmanager
def large_tensors_kept() -> Iterator[None]:
    """Within, the memory of the largest tensors is kept that can be: where the same sizes come again and again."""
    keep_freed_memory(_LARGEST)
    try:
        yield
    finally:
        keep_freed_memory()


def return_freed_memory() -> None:
    """Have glibc give freed memory back to the system, and torch that of a GPU to its driver.

    Called between the windows and the solvers of every stage, after every layer and after a head is solved, or the
    heap would grow as it fragments.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
