"""Everything that wants a GPU, in one go of under nine minutes: what was measured, and which bars it meets.

    python benchmarks/gpu.py OUT [--only PART ...]

What a machine lacks is named first, and the rest goes on. Every part is a process of its own with a share of the time,
and what it leaves goes to the next. A line of JSON is printed, and written to OUT/gpu.jsonl, as soon as there is a
figure; null stands for what time did not reach. OUT/gpu.md is a table of these lines; `--table` makes it again. Random
models, up to 30 GB, lie in the directory for temporary files meanwhile. With --dry-run all of this runs tiny and on the
processor, and no bar is judged.
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARES = {  # seconds, in the order of the parts
    "machine": 15, "check": 40, "bench": 70, "eval": 30, "gptq": 250, "codes": 35, "packing": 50, "large": 40,
}  # fmt: skip
PRELOADED = ["gpu_parts", "transformers.models.llama.modeling_llama", "llmcompress.validate.evaluate"]

Line = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """What a figure should be: at least the limit or, where `least` is false, at most."""

    figure: str
    limit: float
    least: bool = False

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.least else '<='} {self.limit:g}"

    def met(self, value: float | None) -> bool | None:
        """None for a figure that there is not."""
        return None if value is None else value >= self.limit if self.least else value <= self.limit


BARS: dict[str, dict[str, Bar]] = {
    "machine": {},
    "check": {"kernels": Bar("wrong", 0), "memcheck": Bar("errors", 0)},
    "bench": {
        "w4 g128, 1 to 8 rows, large": Bar("least_of_copy", 0.80, True),
        "w4 g128, 16 and 32 rows, large": Bar("least_of_copy", 0.65, True),
        "w4 g128, 1 to 16 rows, large": Bar("least_times_bf16", 3.3, True),
        "w4 g128, all rows": Bar("least_times_bf16", 1.0, True),
        "w8a8, 512 rows": Bar("least_times_bf16", 1.5, True),
        "Q4_K, 1 row": Bar("least_of_copy", 0.70, True),
    },
    "eval": {"logits": Bar("error_of_bound", 1)},
    "gptq": {
        "time": Bar("seconds", 240),
        "memory of tensors": Bar("gb", 6),
        "memory by the driver": Bar("gb", 6),
    },
    "codes": {"codes": Bar("differing_share", 0.001)},
    "packing": {"RTN W4 g128": Bar("of_slowest_link", 0.5, True), "Q4_K_M": Bar("of_slowest_link", 0.5, True)},
    "large": {"two layers": Bar("seconds", math.inf)},  # no bar, but a figure that there should be
}
"""The figures that every go gives, by part and name."""


@dataclass(frozen=True)
class Setting:
    """folder: for models and results. end: of the part, by `time.monotonic`."""

    folder: Path
    dry: bool
    end: float = math.inf

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


def _child(name: str, setting: Setting, pipe: "Connection[Line, None]") -> None:
    """Carry out a part in this process, which leads a group of its own."""
    os.setsid()
    os.dup2(2, 1)  # whatever libraries print is not among the lines
    try:
        from gpu_parts import PARTS

        for line in PARTS[name](setting):
            pipe.send({"part": name, **line})
    except Exception as error:  # whatever it is: the parts after it are to be measured too
        said = (str(error).strip().splitlines() or ["without a word"])[0]
        pipe.send({"part": name, "error": f"{type(error).__name__}: {said}"})


def carried_out(context: Any, name: str, setting: Setting) -> Iterator[Line]:
    """Lines of a part as they come, until its end or that of its time; one more if its process is ended by another."""
    lines, pipe = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, setting, pipe))
    child.start()
    pipe.close()
    try:
        while lines.poll(max(0.0, setting.end - time.monotonic())):
            try:
                yield lines.recv()
            except EOFError:
                child.join(10)
                if child.exitcode:
                    yield {"part": name, "error": f"its process ended with {child.exitcode}"}
                break
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the group that _child began, and nothing else
        child.kill()
        child.join()


def measured(context: Any, names: Iterable[str], folder: Path, dry: bool) -> Iterator[Line]:
    """All lines of some parts, with their bars; null for those that should be there and are not."""
    end = time.monotonic()
    for name in names:
        end += SHARES[name]
        missing = dict(BARS[name])
        if end > time.monotonic():
            for line in carried_out(context, name, Setting(folder, dry, end)):
                bar = None if "error" in line else missing.pop(line.get("name", ""), None)
                yield line if bar is None else judged(line, bar, dry)
        for figure, bar in missing.items():
            yield judged({"part": name, "name": figure, bar.figure: None}, bar, dry)


def judged(line: Line, bar: Bar, dry: bool) -> Line:
    """A line with its bar, if there is one, and whether it is met: null where that cannot be told."""
    if math.isinf(bar.limit):
        return {**line, "met": None}
    return {**line, "bar": str(bar), "met": None if dry else bar.met(line[bar.figure])}


def finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(lines: list[Line]) -> str:
    """What the lines say, as Markdown, but for the products one by one."""
    words = {True: "yes", False: "NO", None: ""}
    rows = ["| part | what | measured | bar | met |", "| --- | --- | --- | --- | --- |"]
    for line in lines:
        figures = {key: value for key, value in line.items() if key not in ("part", "name", "bar", "met", "error")}
        if any(isinstance(value, dict) for value in figures.values()):
            continue
        shown = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in figures.items() if value is not None)
        shown = line.get("error") or shown or "not reached"
        rows.append(
            f"| {line['part']} | {line.get('name', '')} | {shown} | {line.get('bar', '')} | {words[line.get('met')]} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES), help="in the order that is listed")
    parser.add_argument("--table", action="store_true", help="only make the table again, from OUT/gpu.jsonl")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    kept = args.out / "gpu.jsonl"
    if not args.table:
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests")]
        sys.path[:0] = paths
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *paths])),
        }
        # a process that imports once saves the dry run its time; CUDA wants processes that start anew
        context: Any = get_context("forkserver" if args.dry_run else "spawn")
        if args.dry_run:
            context.set_forkserver_preload(PRELOADED)
        args.out.mkdir(parents=True, exist_ok=True)
        names = [name for name in SHARES if name in args.only]
        with tempfile.TemporaryDirectory(prefix="llmcompress-gpu-") as folder, kept.open("w") as file:
            for line in measured(context, names, Path(folder), args.dry_run):
                text = json.dumps(finite(line))
                print(text, flush=True)
                print(text, file=file, flush=True)
    (args.out / "gpu.md").write_text(table([json.loads(text) for text in kept.read_text().splitlines()]))


if __name__ == "__main__":
    main()
