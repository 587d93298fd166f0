"""Fidelity of 4-bit floats, weights alone and with rounded inputs, beside llm-compressor's and beside our integers.

    llmcompress calib pack MODEL -o ids.safetensors --calibration TRAIN.txt --samples 32 --length 512
    python benchmarks/small_floats.py MODEL ids.safetensors TEST.txt --peer VENV/bin/python \
        --modelopt OTHER/bin/python --out runs/

VENV is an environment with llm-compressor, OTHER one with NVIDIA's ModelOpt, as the scripts in benchmarks/peers/ say.
Every tool writes compressed-tensors from the same token ids, ModelOpt its rounded values as floats, and `llmcompress
eval` judges all of them, rounding inputs as each result says. One thread for everyone: seconds are CPU seconds of the
whole process. What `--out` has already is not made again.
"""

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import ANEW, HERE, OURS, Job, Results, evaluate, kl_with_interval, run, set_up, shape

SMOOTHED = str(HERE.parent / "configs" / "w4a4-nvfp4.yaml")
OUR_ROWS = {  # the grid, and the command that makes it, without the model
    "integers of 4 bits, groups of 32": ("gptq", "--bits", "4", "--group-size", "32"),
    "NVFP4": ("gptq", "--type", "nvfp4"),
    "NVFP4, --guided": ("gptq", "--type", "nvfp4", "--guided"),
    "NVFP4, inputs too": ("gptq", "--type", "nvfp4", "--activations", "nvfp4"),
    "NVFP4, inputs too, smoothed": ("run", SMOOTHED),
    "MXFP4": ("gptq", "--type", "mxfp4"),
    "MXFP4, --guided": ("gptq", "--type", "mxfp4", "--guided"),
    "MXFP4, inputs too": ("gptq", "--type", "mxfp4", "--activations", "mxfp4"),
}
PEER_ROWS = {  # the grid, and the tool's name for it
    "NVFP4": "NVFP4A16",
    "NVFP4, inputs too": "NVFP4",
    "MXFP4": "MXFP4A16",
    "MXFP4, inputs too": "MXFP4",
}


def measured(command: list[str], out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make a checkpoint, evaluate and remove it."""
    shutil.rmtree(out, ignore_errors=True)
    cost, _ = run(command, out.with_suffix(".log"))
    figures = evaluate(out, args.model, str(args.text), args.length, args.windows, out.with_suffix(".eval.log"))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    shutil.rmtree(out)
    return {**asdict(cost), "bytes": size, **{key: figures[key] for key in ("perplexity", "kl", "kl_ci", "top1")}}


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path, help="all of its rows are used")
    parser.add_argument("text", type=Path, help="to evaluate on")
    parser.add_argument("--length", type=int, default=512, help="of the windows evaluated")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--peer", help="Python of llm-compressor's environment")
    parser.add_argument("--modelopt", help="Python of ModelOpt's")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    set_up(threads=1)
    args.out.mkdir(parents=True, exist_ok=True)
    samples, length = shape(args.ids)
    tokens = ("--calibration", str(args.ids), "--samples", str(samples), "--length", str(length))
    job = Job(args.model, args.ids, 4, 32)
    results = Results(args.out / "small_floats.json", args, "model", "ids", "text", "length", "windows")
    print("| grid | tool | MB | perplexity | KL (95%) | top-1 | CPU s | peak MB |")
    print("|---|---|---|---|---|---|---|---|")

    def row(grid: str, tool: str, command: list[str], out: Path) -> None:
        found = results.once(f"{grid}, {tool}", lambda: measured(command, out, args))
        print(
            f"| {grid} | {tool} | {found['bytes'] / 1e6:.1f} | {found['perplexity']:.2f} | {kl_with_interval(found)}"
            f" | {found['top1']:.1%} | {found['cpu_s']:.0f} | {found['peak_mb']:.0f} |",
            flush=True,
        )

    for number, (grid, command) in enumerate(OUR_ROWS.items()):
        out = args.out / f"ours-{number}"
        row(grid, "llmcompress gptq", [*OURS, *command, str(args.model), "-o", str(out), *ANEW, *tokens], out)
        if args.peer is None or grid not in PEER_ROWS:
            continue
        for method in ("gptq", "rtn"):
            out = args.out / f"peer-{number}-{method}"
            theirs = [*job.peer("llmcompressor", args.peer, out), "--method", method, "--scheme", PEER_ROWS[grid]]
            row(grid, f"llm-compressor {method}", theirs, out)
    if args.modelopt is not None:
        out = args.out / "modelopt"
        row(
            "NVFP4, as float32",
            "ModelOpt max",
            [args.modelopt, str(HERE / "peers" / "run_modelopt.py"), *map(str, (args.model, args.ids, out))],
            out,
        )


if __name__ == "__main__":
    main()
