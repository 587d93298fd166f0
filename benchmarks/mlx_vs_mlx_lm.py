"""Our MLX checkpoints beside mlx-lm's own, at equal bits: 4 in groups of 64, embedding and head included.

    pip install mlx mlx-cpu mlx-lm
    python benchmarks/mlx_vs_mlx_lm.py MODEL VALID.txt TEST.txt --samples 32 --length 512 --work runs/

Of each: `mlx_lm convert` (to the nearest, embedding and head in 4 bits as well), with --gptq `mlx_lm gptq` (these two
in 6 bits), which reads VALID where its own calibration text would lie, and ours with the same bits, each on windows
that it draws itself. `llmcompress eval` judges all of them on TEST. mlx-lm computes on a processor here, far slower
than on a Mac: its seconds say nothing.
What is there already is not made again.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from common import ANEW, OURS, Results, evaluate, kl_with_interval, run, set_up

GRID = ("--group-size", "64")


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibrate", type=Path)
    parser.add_argument("text", type=Path, help="to evaluate on")
    parser.add_argument("--samples", type=int, default=32, help="windows to calibrate on")
    parser.add_argument("--windows", type=int, default=20, help="windows to evaluate on")
    parser.add_argument("--length", type=int, default=512, help="tokens of both")
    parser.add_argument("--gptq", action="store_true", help="mlx-lm's GPTQ as well")
    parser.add_argument("--work", type=Path, default=Path("runs"))
    args = parser.parse_args()
    set_up(threads=1)
    place = args.work / ".cache" / "mlx-lm" / "calibration_v5.txt"
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(args.calibrate, place)
    os.environ["HOME"] = str(args.work.resolve())  # below which mlx-lm looks for its calibration text
    windows = ("--num-samples", str(args.samples), "--sequence-length", str(args.length))
    sized = ("--samples", str(args.samples), "--length", str(args.length))
    ours = [*OURS, "gptq", args.model, "--type", "offset", "--bits", "4", *GRID, "--format", "mlx"]
    theirs = [sys.executable, "-m", "mlx_lm"]
    jobs = {
        "mlx_lm convert": [*theirs, "convert", "--hf-path", args.model, "-q", "--q-bits", "4", "--q-group-size", "64"],
        "mlx_lm gptq": [*theirs, "gptq", "--model", args.model, "--bits", "4", *GRID, *windows],
    }
    tied = json.loads((args.model / "config.json").read_text()).get("tie_word_embeddings", True)
    results = Results(args.work / "mlx.json", args, "model", "calibrate", "text", "samples", "windows", "length")
    print("| tool | embedding and head | MB | perplexity | KL (95%) | top-1 | CPU s |\n|---|---|---|---|---|---|---|")
    for other, command in jobs.items():
        if other == "mlx_lm gptq" and not args.gptq:
            continue
        bits = "4" if other == "mlx_lm convert" else "6"
        outer = ("--head-bits", bits, *(() if tied else ("--embedding-bits", bits)), "--calibration", args.calibrate)
        for name, made, out in (
            (other, command, "--mlx-path"),
            ("**llmcompress gptq**", [*ours, *outer, *sized, *ANEW], "-o"),
        ):
            folder = args.work / f"{name.strip('*').replace(' ', '-')}-{bits}"
            found = results.once(f"{name}, {bits}", lambda c=[*made, out], f=folder: measured(c, f, args))
            print(
                f"| {name} | {bits} bits | {found['bytes'] / 1e6:.1f} | {found['perplexity']:.2f} | "
                f"{kl_with_interval(found)} | {found['top1']:.1%} | {found['cpu_s']:.0f} |",
                flush=True,
            )


def measured(command: list[Any], out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make a checkpoint, and evaluate it."""
    shutil.rmtree(out, ignore_errors=True)
    cost, _ = run([*map(str, command), str(out)], out.with_suffix(".log"))
    figures = evaluate(out, args.model, str(args.text), args.length, args.windows, out.with_suffix(".eval.log"))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return {"cpu_s": cost.cpu_s, "bytes": size, **{key: figures[key] for key in ("perplexity", "kl", "kl_ci", "top1")}}


if __name__ == "__main__":
    main()
