"""How peak memory grows with depth: our GPTQ on random llama checkpoints that differ in their number of layers.

The sub-command `growth` of benchmarks/gptq_vs_peers.py; see there.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, Job, machine, run, say

BAR = 0.05
WIDTHS = {"hidden": 2048, "ffn": 5632, "heads": 32, "kv-heads": 4, "vocabulary": 32000}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[12, 48], help="growth is from the first to each other"
    )
    for name, width in WIDTHS.items():
        parser.add_argument(f"--{name}", type=int, default=width)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)


def size(args: argparse.Namespace, layers: int) -> int:
    """Bytes of a checkpoint, without its norms."""
    head = args.hidden // args.heads
    layer = args.hidden * (2 * head * (args.heads + args.kv_heads) + 3 * args.ffn)
    return 2 * (layers * layer + 2 * args.vocabulary * args.hidden)


def quantised(args: argparse.Namespace, layers: int, work: Path) -> list[dict[str, Any]]:
    """Write one checkpoint, quantise it `--repeat` times, remove it again."""
    folder = work / f"layers-{layers}"
    model, ids = folder / "model", folder / "ids.safetensors"
    folder.mkdir()
    needed = size(args, layers)
    if shutil.disk_usage(work).free < 1.5 * needed:
        sys.exit(f"{layers} layers need {1.5 * needed / 1e9:.1f} GB in {work}; give another place with --work")
    say(f"{layers} layers: writing {needed / 1e9:.2f} GB of random weights")
    options = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in (*WIDTHS, "samples", "length")]
    written, _ = run(
        [sys.executable, str(HERE / "random_llama.py"), str(model), str(ids), f"--layers={layers}", *options],
        folder / "write.log",
    )
    say(f"{layers} layers: written in {written.wall_s:.0f} s, {written.peak_mb:.0f} MB at most")
    job, runs = Job(model, ids, args.bits, args.group_size, tuple(args.option)), []
    for number in range(args.repeat):
        say(f"{layers} layers: run {number + 1} of {args.repeat}")
        before = machine()["load"]
        cost = run(job.ours("gptq", folder / "out", args.format), folder / "gptq.log")[0]
        runs.append({**asdict(cost), "load_before": before})
        say(f"{layers} layers: {cost.wall_s:.0f} s, {cost.peak_mb:.0f} MB at most")
    shutil.rmtree(folder)
    return runs


def growth(args: argparse.Namespace, work: Path, save: Callable[[dict[str, Any]], None]) -> None:
    """Measure each depth, print one table."""
    facts: dict[str, Any] = {
        "machine": machine(),
        "settings": {
            name: getattr(args, name.replace("-", "_")) for name in (*WIDTHS, "samples", "length", "format", "option")
        },
        "runs": {},
        "bar": BAR,
    }
    for layers in args.layers:
        facts["runs"][layers] = quantised(args, layers, work)
        save(facts)
    rows = {
        layers: {name: median(one[name] for one in runs) for name in ("wall_s", "cpu_s", "peak_mb")}
        for layers, runs in facts["runs"].items()
    }
    facts["median"] = rows
    facts["growth"] = {
        layers: row["peak_mb"] / rows[args.layers[0]]["peak_mb"] - 1
        for layers, row in rows.items()
        if layers != args.layers[0]
    }
    save(facts)
    print("| layers | checkpoint GB | wall s | CPU s | peak MB | growth |")
    print("|---|---|---|---|---|---|")
    for layers, row in rows.items():
        more = f"{facts['growth'][layers]:+.1%}" if layers in facts["growth"] else ""
        figures = f"{row['wall_s']:.0f} | {row['cpu_s']:.0f} | {row['peak_mb']:.0f}"
        print(f"| {layers} | {size(args, layers) / 1e9:.2f} | {figures} | {more} |")
    for layers, more in facts["growth"].items():
        verdict = "within" if more <= BAR else "over"
        print(f"\nfrom {args.layers[0]} to {layers} layers: {more:+.1%}, {verdict} the bar of {BAR:.0%}")
