"""A process with everything imported, from which the commands of attempts are forked, one at a time.

It reads one request a line from its standard input, and answers each with a line on its standard output; both are JSON.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO


def preload() -> None:
    """Import what commands import when they run, and make what reads their words."""
    import gguf  # noqa: F401
    import torch
    from transformers.models.auto import modeling_auto, tokenization_auto  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import llmcompress.engine.execute
    import llmcompress.validate.gguf_verify
    import llmcompress.validate.session
    import llmcompress.validate.verify  # noqa: F401
    from llmcompress.cli import app

    torch.set_num_threads(1)
    app.parser()


def command(words: list[str]) -> int:
    """The exit code of a command line as the shell would see it; what Python would print of an error is printed."""
    from llmcompress.cli import app

    sys.argv = ["llmcompress", *words]
    try:
        app.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def limited(closed: list[int], limits: dict[str, int]) -> None:
    """Close descriptors, and set limits of resources by name (`RLIMIT_FSIZE`), for this process."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    for number in closed:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as Python starts without it


def child(request: dict[str, Any], answer: int) -> int:
    """Run the command of a request in this process, and `verify` after it if that went well; the exit code."""
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    for number, name in ((0, None), (1, "out"), (2, "err")):
        file = (
            os.open(request["logs"] + "/" + name, os.O_WRONLY | os.O_CREAT, 0o600) if name else os.open(os.devnull, 0)
        )
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    limited(request["closed"], request["limits"])
    code = command(request["words"])
    facts = {"grown": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held, "verified": 0}
    if code == 0 and request["verify"]:
        facts["verified"] = command(["verify", *request["verify"]])
    os.write(answer, json.dumps(facts).encode())
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # such as a full device
            code = code or 120  # as Python itself would end
    return code


def _stream(number: int) -> TextIO:
    return os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def fork(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request: the exit code (None if the command was killed for its time), seconds and facts."""
    receiving, sending = os.pipe()
    begun = time.monotonic()
    process = os.fork()
    if process == 0:
        os._exit(child(request, sending))
    os.close(sending)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the child does the same; whoever is first
        os.setpgid(process, process)
    code = None
    while time.monotonic() - begun < request["seconds"]:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    else:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    facts = os.read(receiving, 1 << 16) if code is not None else b""
    os.close(receiving)
    return {"code": code, "seconds": time.monotonic() - begun, **json.loads(facts or b"{}")}


def serve() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    preload()
    for line in sys.stdin:
        answers.write(json.dumps(fork(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
