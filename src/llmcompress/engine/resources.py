"""What a process uses, and how it gives memory back."""

import ctypes
import resource
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt in glibc


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def return_freed_memory(threshold: int = 1 << 20) -> None:
    """Have glibc give blocks above `threshold` bytes back to the system as soon as they are freed.

    By default it raises its threshold up to 32 MB and keeps what lies below in a heap that only grows: tensors of a
    layer are of that size. Does nothing where there is no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, threshold)
        mallopt(_TRIM_THRESHOLD, threshold)
