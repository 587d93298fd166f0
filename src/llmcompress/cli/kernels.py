"""`kernels check`, `bench` and `cache`: whether our CUDA kernels are right, how fast, and where they lie."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcompress.cli import console, watching
from llmcompress.cli import options as flags
from llmcompress.errors import GateError, RecipeError

if TYPE_CHECKING:
    from llmcompress.kernels.check import Checked
    from llmcompress.kernels.cuda import CudaLauncher

_THREADS = 8  # that compile

CacheDirectory = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        envvar="LLMCOMPRESS_KERNEL_CACHE",
        help="Directory of compiled kernels. Default: llmcompress/kernels in the user's cache directory.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Our CUDA kernels: are they right, how fast, what is compiled.")
    group.command("check")(check)
    group.command("bench")(bench)
    group.command("cache")(cache)
    app.add_typer(group, name="kernels", rich_help_panel="Prove")


def check(
    build: Annotated[bool, typer.Option("--build/--no-build", help="First compile every variant there is.")] = True,
    cache: CacheDirectory = None,
    json_: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Compile all kernels for the GPU at hand, run each family on it, and compare with float64."""
    from llmcompress.kernels.check import build_all, cases
    from llmcompress.kernels.check import check as check_case

    launcher = _gpu(cache)
    built: dict[str, int] = {}
    if build:
        with watching.Steps("kernels", quiet or json_) as steps:
            built = build_all(launcher.builder, min(_THREADS, os.cpu_count() or 1), steps.at)
    found: list[Checked] = []
    wanted = list(cases())
    with watching.Steps("cases", quiet or json_) as steps:
        for number, case in enumerate(wanted):
            found += check_case(case, launcher, launcher.device)
            steps.at(number + 1, len(wanted))
    wrong = [item for item in found if not item.ok]
    if json_:
        rows = [asdict(item) | {"ok": item.ok} for item in found]
        console.print_json({"ok": not wrong, "device": _about(launcher), "built": built, "cases": rows})
    else:
        _show(launcher, found)
    if wrong:
        first = wrong[0]
        why = first.failed or f"its error is {first.error:.3g} times what rounding allows"
        raise GateError(f"{len(wrong)} of {len(found)} cases are wrong, such as {first.grid} {first.dtype}: {why}")


def _show(launcher: "CudaLauncher", found: "list[Checked]") -> None:
    """One row for each grid, type and rounding of inputs."""
    groups: dict[tuple[str, str, str], list[Checked]] = {}
    for item in found:
        groups.setdefault((item.grid, item.inputs or "", item.dtype), []).append(item)
    rows = [
        (
            *key,
            ", ".join(str(item.tokens) for item in items),
            ", ".join(dict.fromkeys(name for item in items for name in item.launches)),
            f"{max(item.error for item in items):.3f}",
            "ok" if all(item.ok for item in items) else "WRONG",
        )
        for key, items in groups.items()
    ]
    about = _about(launcher)
    console.table(
        f"{about['name']}, {about['architecture']}, {about['compiler']}: {about['compiled']} kernels compiled, "
        f"{about['cached']} from the cache",
        ("grid", "inputs", "type", "tokens", "kernels that ran", "error / bound", ""),
        rows,
        right=(5,),
    )


def bench(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="Of a weight, as OUTxIN, such as 8192x8192. Repeatable.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Time these of our kernels alone, such as 'w4 g128'. Repeatable.")
    ] = None,
    cache: CacheDirectory = None,
    json_: flags.Json = False,
) -> None:
    """Time all kernels on the GPU at hand, cold caches, beside cuBLAS and what else torch has for the same."""
    from llmcompress.kernels.bench import SHAPES, SUBJECTS, Clock
    from llmcompress.kernels.bench import bench as timed
    from llmcompress.registry import suggest

    names = [subject.name for subject in SUBJECTS]
    for name in only or ():
        if name not in names:
            raise RecipeError(f"there is no kernel {name!r} to time", suggest(name, names))
    shapes = [_shape(text) for text in shape or ()] or SHAPES
    launcher = _gpu(cache)
    subjects = [item for item in SUBJECTS if not only or item.name in only]
    found = list(timed(launcher, Clock(launcher.device), subjects, shapes))
    if json_:
        console.print_json({"device": _about(launcher), "products": [asdict(item) for item in found]})
        return
    console.table(
        f"{_about(launcher)['name']}: microseconds of one product, weights in no cache",
        ("", "out x in", "tokens", "us", "of a copy", "of datasheet", "times bf16"),
        [
            (
                item.name,
                f"{item.shape[0]} x {item.shape[1]}",
                str(item.tokens),
                f"{item.microseconds:.1f}",
                f"{item.of_copy:.0%}",
                "" if item.of_datasheet is None else f"{item.of_datasheet:.0%}",
                f"{item.times_bf16:.2f}",
            )
            for item in found
        ],
        right=(2, 3, 4, 5, 6),
    )


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of them.")] = False,
    cache: CacheDirectory = None,
    json_: flags.Json = False,
) -> None:
    """What compiled kernels are kept."""
    from llmcompress.kernels.build_cache import Cache, directory_of

    kept = Cache(directory_of(cache))
    if clear:
        count, size = kept.clear()
        if json_:
            console.print_json({"directory": str(kept.directory), "removed": count, "bytes": size})
        else:
            console.say(f"{count} files removed from {kept.directory}, {console.size(size)}")
        return
    entries = list(kept.entries())
    total = sum(item.bytes for item in entries)
    if json_:
        files = [{"file": item.file.name, "bytes": item.bytes, "about": item.about} for item in entries]
        console.print_json({"directory": str(kept.directory), "bytes": total, "files": files})
        return
    console.table(
        f"{kept.directory}: {len(entries)} files, {console.size(total)}",
        ("source", "variant", "architecture", "compiler", "size"),
        [_row(item.about, item.bytes) for item in entries],
        right=(4,),
    )


def _row(about: dict[str, Any] | None, size: int) -> tuple[str, ...]:
    if about is None:
        return "damaged; will be made anew", "", "", "", console.size(size)
    variant = " ".join(f"{name}={value}" for name, value in about["defines"])
    return about["source"], variant, about["architecture"], about["compiler"], console.size(size)


def _shape(text: str) -> tuple[int, int]:
    """RecipeError for anything but two sizes."""
    first, _, second = text.partition("x")
    if not (first.isdecimal() and second.isdecimal() and int(first) > 0 and int(second) > 0):
        raise RecipeError(f"--shape {text!r} is not a shape", "write for example --shape 8192x8192")
    if int(first) % 16 or int(second) % 256:
        raise RecipeError(
            f"--shape {text}: outputs must be a multiple of 16 and inputs of 256, which all that is timed takes"
        )
    return int(first), int(second)


def _gpu(cache: Path | None) -> "CudaLauncher":
    from llmcompress.kernels.cuda import open_gpu

    return open_gpu(say=console.say, cache=cache)


def _about(launcher: "CudaLauncher") -> dict[str, Any]:
    import torch

    device, builder = launcher.device, launcher.builder
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "architecture": launcher.architecture,
        "multiprocessors": launcher.multiprocessors,
        "compiler": builder.compiler.version,
        "compiled": builder.compiled,
        "cached": builder.cached,
    }
