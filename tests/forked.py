"""Work in a process of its own, forked from that of the test."""

import os


def forked(work):
    """The process id of a process that does `work` and ends."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return process


def ended(process):
    """Its exit code, once it has ended; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
