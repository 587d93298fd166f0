"""What a process uses, and how it gives memory back."""

import ctypes
import resource
import sys


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def return_freed_memory() -> None:
    """Have glibc give freed memory back to the system; called once per layer.

    Tensors of a layer are of a size that glibc keeps in a heap, which would grow from layer to layer as it fragments.
    (Mapping each of them on its own instead costs a third of the run in page faults.) Does nothing elsewhere.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
