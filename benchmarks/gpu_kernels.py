"""Parts of gpu.py: the machine, and the kernels, whether they are right and how fast. Each gives figures by name."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from gpu import ROOT, Line, Setting

SUMMED = {  # name: kernel, rows, bytes at least, figure
    "w4 g128, 1 to 8 rows, large": ("w4 g128", range(1, 9), 20e6, "of_copy"),
    "w4 g128, 16 and 32 rows, large": ("w4 g128", range(16, 33), 20e6, "of_copy"),
    "w4 g128, 1 to 16 rows, large": ("w4 g128", range(1, 17), 20e6, "times_bf16"),
    "w4 g128, all rows": ("w4 g128", range(1, 513), 0, "times_bf16"),
    "w8a8, 512 rows": ("w8a8", range(512, 513), 0, "times_bf16"),
    "Q4_K, 1 row": ("Q4_K", range(1, 2), 0, "of_copy"),
}


class PartError(Exception):
    """A part could not be carried out."""


def tried(find: Callable[[], Any]) -> Any:
    """What is found; None where whatever is needed for it is missing."""
    try:
        return find()
    except Exception:
        return None


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=15, cwd=ROOT).stdout.strip()


def machine(setting: Setting) -> Iterator[Line]:
    """Where this is measured, and what is missing there."""

    def compiler(name: str) -> str:
        from llmcompress.kernels import compilers

        return compilers.Nvcc().version if name == "nvcc" else compilers.find_compiler().version

    def cuda() -> str | None:
        import torch

        return torch.version.cuda

    listed = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("]")[0]
    packages = {name: _installed(name) for name in re.findall(r'"([\w-]+)', listed)}
    tools = [tool for tool in ("nvidia-smi", "nvcc", "compute-sanitizer") if shutil.which(tool) is None]
    gpu = tried(lambda: said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"))
    name, _, driver = (gpu or "").rpartition(", ")
    yield {
        "dry_run": setting.dry, "gpu": name or None, "driver": driver or None, "torch": packages["torch"],
        "cuda": tried(cuda), "compiler": tried(lambda: compiler("any")), "nvcc": tried(lambda: compiler("nvcc")),
        "version": tried(lambda: __import__("llmcompress").__version__),
        "commit": tried(lambda: said("git", "rev-parse", "HEAD")),
        "missing": [name for name, found in packages.items() if found is None] + tools,
    }  # fmt: skip


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _launcher(setting: Setting) -> Any:
    if not setting.dry:
        from llmcompress.kernels.cuda import open_gpu

        return open_gpu(say=lambda line: print(line, file=sys.stderr))
    import torch

    from emulated import EmulatedLauncher

    launcher: Any = EmulatedLauncher()
    launcher.device, launcher.builder = torch.device("cpu"), None
    return launcher


def _cases(dry: bool) -> list[Any]:
    import torch

    from llmcompress.grids.integer import IntegerSpec
    from llmcompress.kernels.check import KernelCase, cases

    return [KernelCase(IntegerSpec(4, 64), torch.bfloat16, shape=(40, 272), tokens=(1, 3))] if dry else list(cases())


def check(setting: Setting) -> Iterator[Line]:
    from llmcompress.kernels.check import build_all
    from llmcompress.kernels.check import check as checked

    begin, launcher = time.monotonic(), _launcher(setting)
    if launcher.builder is not None:
        build_all(launcher.builder, os.cpu_count() or 1, lambda *_: None)
        yield {"name": "compiled", "seconds": round(time.monotonic() - begin, 1), "count": launcher.builder.compiled}
    every: list[Any] = []
    wanted = groupby(_cases(setting.dry), lambda case: (case.dtype, case.spec.type, case.inputs))
    for (dtype, kind, inputs), group in wanted:
        found = [item for case in group for item in checked(case, launcher, launcher.device)]
        every += found
        name = " ".join(filter(None, (kind, str(dtype).removeprefix("torch."), inputs)))
        yield {"name": name, **_right(found)}
    yield {"name": "kernels", **_right(every), "seconds": round(time.monotonic() - begin, 1)}
    yield _memcheck(setting)


def _right(found: list[Any]) -> Line:
    wrong = [item for item in found if not item.ok]
    first = f"{wrong[0].grid}, {wrong[0].tokens} rows: {wrong[0].failed or wrong[0].error}" if wrong else None
    largest = round(max(item.error for item in found), 3)
    return {"products": len(found), "wrong": len(wrong), "largest_error_of_bound": largest, "first_wrong": first}


def _memcheck(setting: Setting) -> Line:
    """A sample of the kernels under compute-sanitizer; in a dry run without, since the emulator checks each access."""
    begin = time.monotonic()
    if setting.dry:
        sample(True)
        return {"name": "memcheck", "errors": 0, "seconds": round(time.monotonic() - begin, 1)}
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"name": "memcheck", "error": "compute-sanitizer is not on the PATH"}
    command = [tool, "--tool", "memcheck", sys.executable, "-c", "import gpu_kernels; gpu_kernels.sample(False)"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
    if found is None or (done.returncode and found[1] == "0"):
        last = " | ".join(done.stdout.strip().splitlines()[-3:]) or "without a word"
        return {"name": "memcheck", "error": f"ended with {done.returncode}: {last}"}
    return {"name": "memcheck", "errors": int(found[1]), "seconds": round(time.monotonic() - begin, 1)}


def sample(dry: bool) -> None:
    """Every ninth case, small."""
    from dataclasses import replace

    from llmcompress.kernels.check import check as checked

    launcher = _launcher(Setting(Path(), dry))
    for case in _cases(dry)[::9]:
        small = case if dry else replace(case, shape=(264, 1056), tokens=(1, 33))
        for item in checked(small, launcher, launcher.device):
            if not item.ok:
                raise PartError(f"{item.grid}, {item.tokens} rows: {item.failed or item.error}")


def bench(setting: Setting) -> Iterator[Line]:
    """First the kernels that have bars, on all shapes, the large ones before the others."""
    from llmcompress.kernels import bench as timing

    launcher, (clock, shapes, tokens) = _launcher(setting), _timing(setting.dry)
    yield {"name": "copy", "gb_per_second": round(clock.copy_rate / 1e9, 1)}
    barred = {kernel for kernel, *_ in SUMMED.values()}
    for first in (True,) if setting.dry else (True, False):
        subjects = [item for item in timing.SUBJECTS if (item.name in barred) == first]
        every: list[Any] = []
        timed = timing.bench(launcher, clock, subjects, shapes, tokens)
        for (name, shape), group in groupby(timed, lambda item: (item.name, item.shape)):
            products = list(group)
            every += products
            yield {"name": f"{name}, {shape[0]} x {shape[1]}"} | {
                figure: {item.tokens: round(getattr(item, figure), 3) for item in products}
                for figure in ("microseconds", "of_copy", "times_bf16")
            }
        if first:
            yield from summed(every)


def summed(products: Iterable[Any]) -> Iterator[Line]:
    """The worst of what each bar is about; nothing where nothing was timed."""
    found = list(products)
    for name, (kernel, rows, least, figure) in SUMMED.items():
        meant = [item for item in found if item.name == kernel and item.tokens in rows and item.bytes >= least]
        if meant:
            yield {"name": name, f"least_{figure}": round(min(getattr(item, figure) for item in meant), 3)}


def _timing(dry: bool) -> tuple[Any, Any, Any]:
    """A clock, shapes of weights and numbers of rows."""
    import torch

    from llmcompress.kernels import bench as timing

    if not dry:
        shapes = sorted(timing.SHAPES, key=prod, reverse=True)
        return timing.Clock(torch.device("cuda", torch.cuda.current_device())), shapes, timing.TOKENS

    class Processor(timing.Clock):
        def __init__(self) -> None:
            self.device, self.copy_rate, self.datasheet = torch.device("cpu"), 1e9, None

        def captured(self, work: timing.Work, copies: int) -> float:
            begin = time.perf_counter()
            for number in range(min(copies, 2)):
                work(number)
            return (time.perf_counter() - begin) / min(copies, 2)

    return Processor(), ((16, 256),), (1,)
