"""What the benchmark scripts share: processes measured from outside, the tools, decoding and evaluation.

Standard library only, as a child's peak memory is never reported below what the process that started it holds.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
OURS = [sys.executable, "-m", "llmcompress"]
ANEW = ("--overwrite", "--restart")  # nothing that an earlier start has left is used
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Peer:
    """Another tool: its script in benchmarks/peers with the options it gets, and what pip is asked for, in order."""

    title: str
    variant: str
    script: str
    options: tuple[str, ...]
    install: tuple[str, ...]


PEERS = {
    "gptqmodel": Peer(
        "GPTQModel",
        "desc_act",
        "run_gptqmodel.py",
        ("--desc-act",),
        (
            "torch==2.13.0 setuptools wheel packaging ninja pybind11 numpy",
            "--no-build-isolation gptqmodel==7.6.0",
        ),
    ),
    "llmcompressor": Peer(
        "llm-compressor",
        "static act-order",
        "run_llmcompressor.py",
        (),
        ("torch==2.13.0", "llmcompressor==0.14.0.1"),
    ),
}


@dataclass(frozen=True)
class Cost:
    """What a process took: seconds on the clock, CPU seconds with its children, and the peak of the largest of them."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def middle(costs: list[Cost]) -> Cost:
    """The median of each figure."""
    return Cost(*(median(getattr(one, figure) for one in costs) for figure in Cost.__dataclass_fields__))


def kl_with_interval(row: dict[str, Any]) -> str:
    """The KL of a row of figures, and its 95% interval."""
    low, high = row["kl_ci"]
    return f"{row['kl']:.4f} ({low:.4f} to {high:.4f})"


@dataclass(frozen=True)
class Job:
    """What every tool is asked for: one model, one file of token ids, one grid; and more options of our own."""

    model: Path
    ids: Path
    bits: int
    group_size: int
    extra: tuple[str, ...] = ()

    @property
    def grid(self) -> list[str]:
        return ["--bits", str(self.bits), "--group-size", str(self.group_size)]

    def ours(self, method: str, out: Path, form: str) -> list[str]:
        """The command that makes our result."""
        samples, length = shape(self.ids)
        command = [*OURS, method, str(self.model), "-o", str(out), *ANEW, "--json", "--format", form]
        return [
            *command,
            *self.grid,
            *("--calibration", str(self.ids), "--samples", str(samples), "--length", str(length)),
            *self.extra,
        ]

    def peer(self, name: str, python: str, out: Path) -> list[str]:
        """The command that makes a peer's result; the last line it prints is JSON."""
        tool = PEERS[name]
        command = [python, str(HERE / "peers" / tool.script), str(self.model), str(self.ids), str(out)]
        return [*command, *self.grid, *tool.options, *dtype_for(name)]


def dtype_for(peer: str) -> tuple[str, ...]:
    """The type that a peer's weights are loaded in, where it asks: that in which the processor is fastest."""
    return ("--dtype", "bfloat16" if multiplies_bfloat16() else "float32") if peer == "llmcompressor" else ()


def multiplies_bfloat16() -> bool:
    """Whether the processor says that it has instructions for products of bfloat16."""
    said = Path("/proc/cpuinfo")
    return said.exists() and "_bf16" in said.read_text()


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def say(text: str) -> None:
    """A line about progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def set_up(threads: int | None) -> None:
    """The same conditions for every process: no GPU, no network, `threads` threads or as many as there are cores.

    SIGTERM ends the script as an error would, so that no child and no temporary file is left.
    """
    for name in THREADS:
        os.environ.pop(name, None)
        if threads is not None:
            os.environ[name] = str(threads)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Results:
    """Rows by name, kept in a file, so that each is measured once.

    args: the command line; those `named` are what every row is of. A file with rows of anything else ends the script.
    """

    def __init__(self, out: Path, args: argparse.Namespace, *named: str) -> None:
        self.out, self.of = out, {name: str(getattr(args, name)) for name in named}
        out.parent.mkdir(parents=True, exist_ok=True)
        held = json.loads(out.read_text()) if out.exists() else {"of": self.of, "rows": {}}
        if held.get("of") != self.of:
            sys.exit(f"{out} has rows of {held.get('of')}, not of {self.of}: move it, or name another file")
        self.rows: dict[str, dict[str, Any]] = held["rows"]

    def once(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of that name, measured unless it is there."""
        if name not in self.rows:
            say(f"{name} (load {machine()['load']})")
            self.rows[name] = measure()
            partial = self.out.with_name(f"{self.out.name}.partial")
            partial.write_text(json.dumps({"of": self.of, "rows": self.rows}, indent=1) + "\n")
            partial.replace(self.out)
        return self.rows[name]


def one_each(names: Iterable[str], what: str) -> None:
    """Ends the script where two have one name, since only one of them would be measured."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        sys.exit(f"two {what} are called {twice[0]}: rename one")


def machine() -> dict[str, object]:
    """Where figures were measured; `load` of others makes wall time longer."""
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count()
    return {"cores": cores, "load": round(os.getloadavg()[0], 2), "python": sys.version.split()[0]}


def run(command: list[str], log: Path) -> tuple[Cost, str]:
    """Cost and standard output of a command; its standard error goes to `log`. Ends the script if it fails.

    The peak is the largest of the process and those it waited for, not their sum; pages of mapped files count.
    """
    with log.open("w") as errors, tempfile.TemporaryFile("w+") as output:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=output, stderr=errors)
        try:
            _, status, used = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            child.wait()
            raise
        wall = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    if child.returncode:
        tail = "\n".join([*printed.splitlines()[-5:], *log.read_text(errors="replace").splitlines()[-15:]])
        sys.exit(f"{tail}\n{' '.join(command)}\nfailed with {child.returncode}")
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return Cost(round(wall, 2), round(used.ru_utime + used.ru_stime, 2), round(peak, 1)), printed


def last_json(printed: str) -> dict[str, Any]:
    """The JSON object on the last line a peer printed."""
    return json.loads(printed.strip().splitlines()[-1])


def pack(model: Path, out: Path, calibration: str, samples: int, length: int) -> Path:
    """Write token ids for all."""
    command = [*OURS, "calib", "pack", str(model), "-o", str(out), "--calibration", calibration]
    run([*command, "--samples", str(samples), "--length", str(length)], out.with_suffix(".log"))
    return out


def shape(ids: Path) -> list[int]:
    """[samples, length] of a file of token ids, from its header."""
    with ids.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))["input_ids"]["shape"]


def split_peer(text: str) -> tuple[str, str | None]:
    """NAME or NAME:PYTHON as given to --peer."""
    name, _, python = text.partition(":")
    if name not in PEERS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PEERS)}")
    return name, python or None


def install(name: str, folder: Path) -> str:
    """Python of a peer's own environment in `folder`, made there unless it is there whole."""
    home = folder.resolve() / name
    done, python = home / "installed", str(home / "bin" / "python")
    if not done.exists():
        home.mkdir(parents=True, exist_ok=True)
        say(f"installing {name} into {home}")
        run([sys.executable, "-m", "venv", "--clear", str(home)], folder / f"{name}.log")
        for wanted in PEERS[name].install:
            run([python, "-m", "pip", "install", *wanted.split()], folder / f"{name}.log")
        done.touch()
    return python


def decode(python: str, out: Path) -> tuple[Path, int]:
    """A float32 copy of a result, beside it, and how many linears were decoded: one evaluation judges all alike."""
    dense = out.with_name(f"{out.name}-dense")
    command = [python, str(HERE / "peers" / "densify.py"), str(out), str(dense)]
    return dense, int(run(command, out.with_name(f"{dense.name}.log"))[1].split()[0])


def evaluate(out: Path, model: Path, text: str, length: int, windows: int, log: Path) -> dict[str, Any]:
    """What `llmcompress eval` says of a result."""
    command = [*OURS, "eval", str(out), "--ref", str(model), "--text", text, "--json"]
    return json.loads(run([*command, "--length", str(length), "--windows", str(windows)], log)[1])
