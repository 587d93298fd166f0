"""Our pruning against llm-compressor's: fidelity and time, on the same tokens and by the same evaluation.

    llmcompress calib pack MODEL -o ids.safetensors --calibration TRAIN.txt --samples 64 --length 512
    python benchmarks/pruning.py MODEL ids.safetensors TEST.txt --windows 40 --peer PYTHON --out p.json

Every method at every sparsity by both tools, each in a process of its own with one thread: seconds are CPU seconds of
the whole process, which do not depend on how busy the machine is. `--also` adds settings of ours that no peer has, such
as `--also "sparsegpt --sparsity 0.5 --refit 0"`. Results that are in `--out` already are not made again; outputs are
removed once they are evaluated.
"""

import argparse
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common import ANEW, HERE, OURS, Results, dtype_for, evaluate, install, run, set_up, shape

Row = dict[str, Any]
SPARSITIES = {"50%": ("--sparsity", "0.5"), "2:4": ("--pattern", "2:4"), "4:8": ("--pattern", "4:8")}
METHODS = ("magnitude", "wanda", "sparsegpt")
PEER = "llmcompressor"


def jobs(args: argparse.Namespace, python: str | None) -> dict[str, list[str]]:
    """Commands by the name of what they do, each but for where its output goes."""
    samples, length = shape(args.ids)
    text = ["--calibration", str(args.ids), "--samples", str(samples), "--length", str(length)]
    found = {}
    for method in METHODS:
        for name, options in SPARSITIES.items():
            given = [] if method == "magnitude" else text
            found[f"{method} {name}"] = [
                *OURS,
                method,
                str(args.model),
                *options,
                *given,
                *ANEW,
                "--json",
                "-o",
            ]
            if python is not None and method != "magnitude":
                script = [python, str(HERE / "peers" / "run_llmcompressor.py"), "--method", method, *options]
                script += dtype_for(PEER)
                found[f"llm-compressor {method} {name}"] = [*script, str(args.model), str(args.ids)]
    for more in args.also:
        method, *options = more.split()
        given = [] if method == "magnitude" else text
        found[more] = [*OURS, method, str(args.model), *options, *given, *ANEW, "--json", "-o"]
    return found


def measured(name: str, command: list[str], args: argparse.Namespace) -> Row:
    """Run a command, evaluate what it made, and remove it."""
    out = args.work / "".join(letter if letter.isalnum() else "-" for letter in name)
    shutil.rmtree(out, ignore_errors=True)
    cost, _ = run([*command, str(out)], out.with_suffix(".log"))
    figures = evaluate(out, args.model, args.text, args.length, args.windows, out.with_suffix(".log"))
    shutil.rmtree(out)
    return {**asdict(cost), **{key: figures[key] for key in ("perplexity", "kl", "kl_ci", "top1")}}


def table(rows: dict[str, Row]) -> str:
    """As Markdown; beside our figures their share of the peer's."""
    lines = [
        "| pruned by | perplexity | KL (95%) | top-1 | CPU s | of the peer's | peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        low, high = row["kl_ci"]
        peer = rows.get(f"llm-compressor {name}")
        share = f"{row['cpu_s'] / peer['cpu_s']:.2f}" if peer else ""
        kl = f"{row['kl']:.4f} ({low:.4f} to {high:.4f})"
        cost = f"{row['cpu_s']:.0f} | {share} | {row['peak_mb']:.0f}"
        lines.append(f"| {name} | {row['perplexity']:.2f} | {kl} | {row['top1']:.1%} | {cost} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path, help="all of its rows are used")
    parser.add_argument("text", help="to evaluate on")
    parser.add_argument("--length", type=int, default=512, help="of the windows evaluated")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("runs/pruning.json"))
    parser.add_argument("--peer", nargs="?", const="", metavar="PYTHON", help="llm-compressor; installed without one")
    parser.add_argument("--environments", type=Path, default=Path("peers"), help="where the peer is installed")
    parser.add_argument("--only", nargs="*", default=[], help="names to measure, as the table has them")
    parser.add_argument("--also", nargs="*", default=[], metavar="COMMAND", help="our methods with other options")
    args = parser.parse_args()
    set_up(threads=1)
    args.work.mkdir(parents=True, exist_ok=True)
    python = None if args.peer is None else args.peer or install(PEER, args.environments)
    wanted = jobs(args, python)
    unknown = set(args.only) - wanted.keys()
    if unknown:
        parser.error(f"--only {unknown.pop()!r} is none of {', '.join(wanted)}")
    results = Results(args.out, args, "model", "ids", "text", "length", "windows")
    for name, command in wanted.items():
        if not args.only or name in args.only:
            results.once(name, partial(measured, name, command, args))
    print(table({name: results.rows[name] for name in wanted if name in results.rows}))


if __name__ == "__main__":
    main()
