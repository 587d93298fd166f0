"""How time and peak memory grow with layers, tokens and width: our GPTQ on random llama checkpoints.

The sub-command `growth` of benchmarks/gptq_vs_peers.py; see there.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, Job, machine, middle, run, say

BAR = 0.05
WRITER = HERE.parent / "scripts" / "make_random_model.py"


class Point(NamedTuple):
    """A model's shape, and how much of it and of text there is."""

    shape: str
    layers: int
    windows: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["tinyllama"], help=f"as {WRITER.name} names them")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--windows", type=int, nargs="+", default=[8])
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")


def written(point: Point, args: argparse.Namespace, folder: Path) -> Path:
    """A random checkpoint with its token ids."""
    model = folder / "model"
    say(f"{point}: writing random weights")
    sizes = ("--layers", point.layers, "--samples", point.windows, "--length", args.length, "--threads", 2)
    run([sys.executable, str(WRITER), point.shape, str(model), *map(str, sizes)], folder / "write.log")
    return model


def quantised(point: Point, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Write one checkpoint, quantise it `--repeat` times, remove it again: all costs, and its size."""
    folder = work / "growth"
    folder.mkdir()
    model = written(point, args, folder)
    job = Job(model, model / "ids.safetensors", args.bits, args.group_size, tuple(args.option))
    costs, loads = [], []
    for _ in range(args.repeat):
        loads.append(machine()["load"])
        cost = run(job.ours("gptq", folder / "out", args.format), folder / "gptq.log")[0]
        costs.append(cost)
        say(f"{point}: {cost.wall_s:.0f} s, {cost.cpu_s:.0f} CPU s, {cost.peak_mb:.0f} MB at most")
    size = json.loads((model / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    shutil.rmtree(folder)
    runs = [{**asdict(cost), "load_before": load} for cost, load in zip(costs, loads, strict=True)]
    return {**point._asdict(), "gb": size / 1e9, "runs": runs, **asdict(middle(costs))}


def fitted(rows: list[dict[str, Any]], figure: str, length: int) -> list[float]:
    """Least squares of a figure by what a run, each layer, each 1,000 tokens and each layer's 1,000 tokens take."""
    import numpy as np  # not before the last child: its peak would count with theirs

    sizes = [(row["layers"], row["windows"] * length / 1e3) for row in rows]
    terms = np.array([[1, layers, tokens, layers * tokens] for layers, tokens in sizes])
    return [float(found) for found in np.linalg.lstsq(terms, np.array([row[figure] for row in rows]), rcond=None)[0]]


def growth(args: argparse.Namespace, work: Path, save: Callable[[dict[str, Any]], None]) -> None:
    """Measure every combination, print one table, what was fitted to it, and growth by layers beside the bar."""
    rows: list[dict[str, Any]] = []
    settings = {name: getattr(args, name) for name in ("length", "format", "option")}
    facts: dict[str, Any] = {"machine": machine(), "settings": settings, "rows": rows, "bar": BAR}
    for point in map(Point._make, product(args.shapes, args.layers, args.windows)):
        rows.append(quantised(point, args, work))
        save(facts)
    print("| shape | layers | tokens | checkpoint GB | wall s | CPU s | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        figures = f"{row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['peak_mb']:.0f}"
        tokens = row["windows"] * args.length
        print(f"| {row['shape']} | {row['layers']} | {tokens:,} | {row['gb']:.2f} | {figures} |")
    for shape in args.shapes:
        own = [row for row in rows if row["shape"] == shape]
        if len(args.layers) > 1 and len(args.windows) > 1:
            for figure, unit in (("cpu_s", "CPU s"), ("peak_mb", "MB")):
                once, layer, tokens, both = fitted(own, figure, args.length)
                print(
                    f"\n{shape}: {once:.2f} {unit}, and {layer:.2f} for a layer, {tokens:.3f} for 1,000 tokens, "
                    f"{both:.4f} for 1,000 tokens of a layer"
                )
        first, *others = [row for row in own if row["windows"] == args.windows[0]]
        for row in others:
            more = row["peak_mb"] / first["peak_mb"] - 1
            verdict = "within" if more <= BAR else "over"
            print(
                f"\n{shape}: memory from {first['layers']} to {row['layers']} layers: {more:+.1%}, "
                f"{verdict} the bar of {BAR:.0%}"
            )
