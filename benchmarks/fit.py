"""Mixed precision against one width: `llmcompress fit` and uniform grids of the same size, on the same tokens.

    llmcompress calib pack MODEL -o ids.safetensors --calibration TRAIN.txt --samples 16 --length 512
    python benchmarks/fit.py MODEL ids.safetensors TEST.txt --bpw 3.5 4.5 --uniform 3:32 3:128 4:32 4:128 \
        --windows 20 --work runs/ --out fit.json

All are calibrated on the ids and written dense, so that every width can be. Sensitivities are measured once and kept in
the work directory. Results that are in `--out` already are not made again.
"""

import argparse
import re
from functools import partial
from pathlib import Path

import yaml
from common import ANEW, OURS, Results, kl_with_interval, run, say, set_up, shape

from methods import Row, measured


def fitted(bits: float, args: argparse.Namespace) -> Path:
    """The recipe that `fit` finds."""
    out = args.work / f"fit-{args.method}-{bits:g}.yaml"
    samples, length = shape(args.ids)
    command = [*OURS, "fit", str(args.model), "--bpw", str(bits), "--format", "dense", "--method", args.method]
    command += ["--calibration", str(args.ids), "--samples", str(samples), "--length", str(length)]
    command += ["--sensitivity", str(args.work / f"sensitivity-{args.method}.json"), *args.more.split()]
    cost, _ = run([*command, "-o", str(out), *ANEW, "--json"], out.with_suffix(".log"))
    say(f"{out.stem}: {cost.cpu_s:.0f} CPU s, {cost.peak_mb:.0f} MB")
    return out


def uniform(grid: str, args: argparse.Namespace) -> Path:
    """The recipe of one grid for all."""
    bits, group, *rest = grid.split(":")
    step = {"method": args.method, "bits": int(bits), "group_size": int(group), "sym": not rest}
    out = args.work / f"uniform-{args.method}-{grid.replace(':', '-')}.yaml"
    out.write_text(yaml.safe_dump({"steps": [step], "output": {"format": "dense"}}))
    return out


def a_grid(text: str) -> str:
    """BITS:GROUP, asymmetric with :asym after it, for argparse."""
    if re.fullmatch(r"\d+:-?\d+(:asym)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text} is not BITS:GROUP or BITS:GROUP:asym")
    return text


def compared(recipe: Path, args: argparse.Namespace) -> Row:
    """The figures of a recipe, with the divergence that it expects, if it says."""
    expected = (yaml.safe_load(recipe.read_text()).get("expected") or {}).get("kl")
    return measured(recipe, args) | ({} if expected is None else {"kl_expected": expected})


def table(rows: dict[str, Row]) -> str:
    """As Markdown, in the order they were asked for."""
    lines = [
        "| recipe | bits per quantised weight | KL (95%) | KL expected | perplexity | top-1 |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        expected = f"{row['kl_expected']:.4f}" if "kl_expected" in row else ""
        kl = kl_with_interval(row)
        figures = f"{kl} | {expected} | {row['perplexity']:.2f} | {row['top1']:.1%}"
        lines.append(f"| {name} | {row['bits_per_quantised_weight']:.3f} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path, help="all of its rows are used")
    parser.add_argument("text", help="to evaluate on")
    parser.add_argument("--bpw", type=float, nargs="*", default=[3.5, 4.5])
    default = ["3:32", "3:128", "4:32", "4:128"]
    parser.add_argument("--uniform", nargs="*", type=a_grid, default=default, metavar="BITS:GROUP[:asym]")
    parser.add_argument("--method", choices=["gptq", "rtn"], default="gptq")
    parser.add_argument("--more", default="", help="more options of fit")
    parser.add_argument("--length", type=int, default=512, help="of the windows evaluated")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("runs/fit.json"))
    args = parser.parse_args()
    set_up(threads=1)
    args.work.mkdir(parents=True, exist_ok=True)
    results = Results(args.out, args, "model", "ids", "text", "more", "length", "windows")
    rows = {}
    for make, wanted in ((fitted, args.bpw), (uniform, args.uniform)):
        for asked in wanted:
            recipe = make(asked, args)  # type: ignore[operator]
            rows[recipe.stem] = results.once(recipe.stem, partial(compared, recipe, args))
    print(table(rows))


if __name__ == "__main__":
    main()
