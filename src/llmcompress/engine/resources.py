"""What a process has used."""

import resource
import sys


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
