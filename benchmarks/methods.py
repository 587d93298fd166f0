"""What recipes make of a model: size, fidelity, time and memory, each on the same tokens and the same evaluation.

    llmcompress calib pack MODEL -o ids.safetensors --calibration TRAIN.txt --samples 16 --length 512
    python benchmarks/methods.py MODEL ids.safetensors TEST.txt configs/awq-w4.yaml benchmarks/recipes/*.yaml \
        --windows 40 --work runs/ --out methods.json

Recipes keep their steps and format; the calibration is replaced by the ids. One thread: seconds are CPU seconds of the
whole process, which do not depend on how busy the machine is. Results that are in `--out` already are not made again.
Outputs are removed once they are evaluated.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from common import ANEW, OURS, Results, evaluate, kl_with_interval, one_each, run, set_up, shape

Row = dict[str, Any]


def measured(recipe: Path, args: argparse.Namespace) -> Row:
    """Run a recipe, evaluate what it made, and remove it."""
    samples, length = shape(args.ids)
    data = yaml.safe_load(recipe.read_text())
    data["calibration"] = {"source": str(args.ids.resolve()), "samples": samples, "length": length}
    file, out = args.work / f"{recipe.stem}.run.yaml", args.work / recipe.stem
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    cost, printed = run(
        [*OURS, "run", str(file), str(args.model), "-o", str(out), *ANEW, "--json"], args.work / f"{recipe.stem}.log"
    )
    result = json.loads(printed)
    figures = evaluate(out, args.model, args.text, args.length, args.windows, args.work / "eval.log")
    shutil.rmtree(out)
    return {
        **asdict(cost),
        "bytes": result["output_bytes"],
        "bits_per_quantised_weight": result["bits_per_quantised_weight"],
        **{key: figures[key] for key in ("perplexity", "kl", "kl_ci", "top1")},
    }


def table(rows: dict[str, Row]) -> str:
    """As Markdown, in the order of the recipes."""
    lines = [
        "| recipe | bits per quantised weight | perplexity | KL (95%) | top-1 | CPU s | peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        kl = kl_with_interval(row)
        bits = row["bits_per_quantised_weight"]
        figures = f"{'' if bits is None else format(bits, '.2f')} | {row['perplexity']:.2f} | {kl} | {row['top1']:.1%}"
        lines.append(f"| {name} | {figures} | {row['cpu_s']:.0f} | {row['peak_mb']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path, help="all of its rows are used")
    parser.add_argument("text", help="to evaluate on")
    parser.add_argument("recipes", type=Path, nargs="+")
    parser.add_argument("--length", type=int, default=512, help="of the windows evaluated")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("runs/methods.json"))
    args = parser.parse_args()
    set_up(threads=1)
    args.work.mkdir(parents=True, exist_ok=True)
    one_each((recipe.stem for recipe in args.recipes), "recipes")
    results = Results(args.out, args, "model", "ids", "text", "length", "windows")
    print(table({one.stem: results.once(one.stem, partial(measured, one, args)) for one in args.recipes}))


if __name__ == "__main__":
    main()
