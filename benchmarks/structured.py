"""What it costs to leave parts of a model out, and what a repair of low rank gives back.

    python benchmarks/structured.py MODEL CALIBRATION.txt TEST.txt --windows 20 --work runs/ --out structured.json

Depth: three layers by similarity and by KL divergence. Width: a quarter of the feed-forward's channels, cut and
repaired. Low rank: 3 bits by rtn and gptq, with adapters of rank 32 by outputs and by weights (plain SVD), and 4 bits,
which cost about as much as 3 bits and an adapter. One thread: seconds are CPU seconds of the whole process. Rows that
are in `--out` already are not made again; `--only` chooses some. Outputs are removed at the end.
"""

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import OURS, Results, kl_with_interval, run, set_up

Row = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A command with its options; samples: windows of text it sees. base: the row whose output is repaired."""

    command: tuple[str, ...]
    samples: int = 32
    base: str | None = None


_THREE = ("--format", "gptq", "--bits", "3", "--group-size", "64")
_REPAIR = ("lora", "--rank", "32")
WANTED = {
    "depth, similarity": Wanted(("depth", "--drop", "3")),
    "depth, similarity, contiguous": Wanted(("depth", "--drop", "3", "--contiguous")),
    "depth, kl": Wanted(("depth", "--drop", "3", "--by", "kl"), samples=4),
    "width, cut": Wanted(("width", "--ratio", "0.25", "--by", "energy", "--no-repair")),
    "width, energy": Wanted(("width", "--ratio", "0.25", "--by", "energy")),
    "width, cost": Wanted(("width", "--ratio", "0.25", "--by", "cost")),
    "rtn, 3 bits": Wanted(("rtn", *_THREE), samples=0),
    "rtn, 3 bits + svd": Wanted((*_REPAIR, "--by", "weights"), base="rtn, 3 bits"),
    "rtn, 3 bits + lora": Wanted(_REPAIR, base="rtn, 3 bits"),
    "gptq, 3 bits": Wanted(("gptq", *_THREE)),
    "gptq, 3 bits + svd": Wanted((*_REPAIR, "--by", "weights"), base="gptq, 3 bits"),
    "gptq, 3 bits + lora": Wanted(_REPAIR, base="gptq, 3 bits"),
    "gptq, 4 bits": Wanted(("gptq", "--format", "gptq", "--bits", "4", "--group-size", "64")),
}


def measured(name: str, args: argparse.Namespace) -> Row:
    """Make a row's output, and evaluate it."""
    wanted = WANTED[name]
    out = place(name, args)
    text = ["--calibration", args.calibration, "--samples", str(wanted.samples), "--length", "512"]
    models = [str(args.model)] if wanted.base is None else [str(args.model), str(made(wanted.base, args))]
    shutil.rmtree(Path(f"{out}.work"), ignore_errors=True)
    options = [*wanted.command[1:], *(text if wanted.samples else []), "-o", str(out), "--overwrite", "--json"]
    cost, printed = run([*OURS, wanted.command[0], *models, *options], out.with_suffix(".log"))
    result = json.loads(printed)
    subject = [str(out)] if wanted.base is None else [models[1], "--adapter", str(out)]
    command = [*OURS, "eval", *subject, "--ref", str(args.model), "--text", args.text, "--length", "512"]
    _, printed = run([*command, "--windows", str(args.windows), "--json"], out.with_suffix(".log"))
    figures = json.loads(printed)
    return {
        **asdict(cost),
        "bytes": result["output_bytes"],  # of an adapter: its own
        "removed": result.get("depth", {}).get("removed"),
        "bits_added": result.get("lora", {}).get("bits_per_weight_added"),
        **{key: figures[key] for key in ("perplexity", "ref_perplexity", "kl", "kl_ci", "top1")},
    }


def place(name: str, args: argparse.Namespace) -> Path:
    """Where the output of a row lies."""
    return args.work / name.replace(", ", "-").replace(" + ", "-").replace(" ", "")


def made(name: str, args: argparse.Namespace) -> Path:
    """The output of a row, made if it is not there."""
    out = place(name, args)
    if not out.exists():
        measured(name, args)
    return out


def table(rows: dict[str, Row]) -> str:
    """As Markdown, in the order of the rows."""
    lines = ["| | MB | perplexity | KL (95%) | top-1 | CPU s | peak MB |", "|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        figures = f"{row['perplexity']:.2f} | {kl_with_interval(row)} | {row['top1']:.1%}"
        lines.append(f"| {name} | {row['bytes'] / 1e6:.1f} | {figures} | {row['cpu_s']:.0f} | {row['peak_mb']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", help="text that layers and adapters are chosen on")
    parser.add_argument("text", help="to evaluate on")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--only", action="append", choices=list(WANTED), help="this row; repeatable")
    parser.add_argument("--keep", action="store_true", help="keep the outputs")
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("runs/structured.json"))
    args = parser.parse_args()
    set_up(threads=1)
    args.work.mkdir(parents=True, exist_ok=True)
    results = Results(args.out, args, "model", "calibration", "text", "windows")
    for name in args.only or WANTED:
        results.once(name, partial(measured, name, args))
    if not args.keep:
        for name in WANTED:
            shutil.rmtree(place(name, args), ignore_errors=True)
    print(table({name: results.rows[name] for name in WANTED if name in results.rows}))


if __name__ == "__main__":
    main()
