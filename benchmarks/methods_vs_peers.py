"""Our pruning, AWQ, SmoothQuant and NF4 against the peers': fidelity, time and memory on the same tokens.

    llmcompress calib pack MODEL -o ids.safetensors --calibration TRAIN.txt --samples 64 --length 512
    python benchmarks/methods_vs_peers.py MODEL ids.safetensors TEST.txt --windows 40 --peer PYTHON --out p.json

Every method by both tools, each in a process of its own, one after another; with `--repeat` in so many rounds, of which
the table has medians. Seconds on the clock are of `--threads`, on an otherwise idle machine; CPU seconds, of the whole
process, depend less on that. llm-compressor's environment is that of `--peer`, or installed; bitsandbytes is that of
the Python which runs this. `--also` adds settings of ours that no peer has, such as `--also "sparsegpt --sparsity 0.5
--refit 0"`. Results that are in `--out` already are not made again; outputs are removed once they are evaluated.
"""

import argparse
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    ANEW,
    HERE,
    OURS,
    Results,
    dtype_for,
    evaluate,
    install,
    kl_with_interval,
    middle,
    positive,
    run,
    set_up,
    shape,
)

Row = dict[str, Any]
PEER = "llmcompressor"
SPARSITIES = {"50%": ("--sparsity", "0.5"), "2:4": ("--pattern", "2:4"), "4:8": ("--pattern", "4:8")}
GROUPS = ("--bits", "4", "--group-size", "64")
WITHOUT_TEXT = ("magnitude", "nf4")
METHODS: dict[str, tuple[str, ...]] = {  # our command, by the name of what it does
    **{
        f"{method} {name}": (method, *options)
        for method in ("magnitude", "wanda", "sparsegpt")
        for name, options in SPARSITIES.items()
    },
    "awq, 4 bits": ("awq", *GROUPS),
    "smoothquant, W8A8": ("smoothquant",),
    "nf4": ("nf4",),
}
OPTIONS_OF_PEER = {"smoothquant, W8A8": ("--method", "smoothquant", "--scheme", "W8A8")}  # where they are not ours


def of_peer(name: str, python: str) -> list[str] | None:
    """What a peer's script is called with before the model, None where no peer has the method."""
    method, *options = METHODS[name]
    if method == "magnitude":
        return None
    if method == "nf4":
        return [sys.executable, str(HERE / "peers" / "run_bitsandbytes.py")]
    given = OPTIONS_OF_PEER.get(name, ("--method", method, *options))
    return [python, str(HERE / "peers" / "run_llmcompressor.py"), *given, *dtype_for(PEER)]


def jobs(args: argparse.Namespace, python: str | None) -> dict[str, list[str]]:
    """Commands by the name of what they do, each but for where its output goes."""
    samples, length = shape(args.ids)
    text = ["--calibration", str(args.ids), "--samples", str(samples), "--length", str(length)]
    found = {}
    for name, (method, *options) in {**METHODS, **{more: tuple(more.split()) for more in args.also}}.items():
        given = [] if method in WITHOUT_TEXT else text
        found[name] = [*OURS, method, str(args.model), *options, *given, *ANEW, "--json", "-o"]
        if python is not None and name in METHODS and (peer := of_peer(name, python)) is not None:
            found[f"peer's {name}"] = [*peer, str(args.model), str(args.ids)]
    return found


def measured(name: str, command: list[str], args: argparse.Namespace) -> Row:
    """Run a command `--repeat` times, evaluate what it made, and remove it."""
    out = args.work / "".join(letter if letter.isalnum() else "-" for letter in name)
    costs = []
    for _ in range(args.repeat):
        shutil.rmtree(out, ignore_errors=True)
        costs.append(run([*command, str(out)], out.with_suffix(".log"))[0])
    figures = evaluate(out, args.model, args.text, args.length, args.windows, out.with_suffix(".log"))
    shutil.rmtree(out)
    return {**asdict(middle(costs)), **{key: figures[key] for key in ("perplexity", "kl", "kl_ci", "top1")}}


def table(rows: dict[str, Row]) -> str:
    """As Markdown; beside our figures their shares of the peer's: seconds on the clock, CPU seconds, memory."""
    lines = [
        "| | perplexity | KL (95%) | top-1 | wall s | CPU s | peak MB | of the peer's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        peer = rows.get(f"peer's {name}")
        shares = (f"{row[figure] / peer[figure]:.2f}" for figure in ("wall_s", "cpu_s", "peak_mb")) if peer else ()
        cost = f"{row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['peak_mb']:.0f} | {', '.join(shares)}"
        lines.append(f"| {name} | {row['perplexity']:.2f} | {kl_with_interval(row)} | {row['top1']:.1%} | {cost} |")
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
    parser.add_argument("--out", type=Path, default=Path("runs/methods_vs_peers.json"))
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="median of N runs")
    parser.add_argument("--peer", nargs="?", const="", metavar="PYTHON", help="llm-compressor; installed without one")
    parser.add_argument("--environments", type=Path, default=Path("peers"), help="where the peer is installed")
    parser.add_argument(
        "--only", nargs="*", default=[], help="names to measure, as the table has them; with the peer's"
    )
    parser.add_argument("--also", nargs="*", default=[], metavar="COMMAND", help="our methods with other options")
    args = parser.parse_args()
    set_up(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    python = None if args.peer is None else args.peer or install(PEER, args.environments)
    wanted = jobs(args, python)
    unknown = set(args.only) - wanted.keys()
    if unknown:
        parser.error(f"--only {unknown.pop()!r} is none of {', '.join(wanted)}")
    results = Results(args.out, args, "model", "ids", "text", "length", "windows", "threads", "repeat")
    for name, command in wanted.items():
        if not args.only or name.removeprefix("peer's ") in args.only:
            results.once(name, partial(measured, name, command, args))
    print(table({name: results.rows[name] for name in wanted if name in results.rows}))


if __name__ == "__main__":
    main()
