"""Fidelity of our GPTQ against the peers': one model, one set of token ids, one evaluation for all.

    llmcompress calib pack MODEL -o ids.safetensors --calibration TRAIN.txt --samples 128 --length 512
    python benchmarks/fidelity.py MODEL ids.safetensors TEST.txt --bits 4 --group-size 64 --out runs/ \
        --peer gptqmodel:VENV/bin/python --peer llmcompressor:VENV/bin/python

Each peer runs in an environment of its own, as the docstrings of benchmarks/peers/run_*.py say, and its result is
decoded to float32 by benchmarks/peers/densify.py: `llmcompress eval` judges all alike. One thread for everyone: seconds
are CPU seconds (user and system) of the whole process. What is there already is evaluated again but not made again.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from common import OURS, PEERS, Job, decode, evaluate, kl_with_interval, run, set_up, split_peer


def made(command: list[str], out: Path) -> dict[str, float]:
    """Make `out` unless the same command has made it before; what that took."""
    facts = out.with_name(f"{out.name}.json")
    held = json.loads(facts.read_text()) if facts.exists() else {}
    if held.get("command") != command:
        for stale in (out, out.with_name(f"{out.name}-dense")):
            shutil.rmtree(stale, ignore_errors=True)
        held = {"command": command, "cost": asdict(run(command, out.with_name(f"{out.name}.log"))[0])}
        facts.write_text(json.dumps(held))
    return held["cost"]


def decoded(command: list[str], python: str, out: Path) -> tuple[Path, dict[str, float]]:
    """A tool's result, decoded to float32, and what it took."""
    cost = made(command, out)
    dense = out.with_name(f"{out.name}-dense")
    return dense if (dense / "config.json").exists() else decode(python, out)[0], cost


def main() -> None:
    """Make what is missing, evaluate everything, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path, help="all of its rows are used")
    parser.add_argument("text", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="of the windows evaluated")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    names = ", ".join(PEERS)
    parser.add_argument("--peer", action="append", default=[], type=split_peer, metavar="NAME:PYTHON", help=names)
    args = parser.parse_args()
    set_up(threads=1)
    args.out.mkdir(parents=True, exist_ok=True)
    job = Job(args.model, args.ids, args.bits, args.group_size)
    results = {}
    for method in ("gptq", "rtn"):
        out = args.out / f"llmcompress-{method}-w{args.bits}g{args.group_size}"
        results[f"llmcompress {method}"] = decoded(job.ours(method, out, "compressed-tensors"), OURS[0], out)
    for name, python in args.peer:
        if python is None:
            parser.error(f"--peer {name} needs the Python of its environment: {name}:PYTHON")
        out = args.out / f"{name}-w{args.bits}g{args.group_size}"
        results[f"{PEERS[name].title}, {PEERS[name].variant}"] = decoded(job.peer(name, python, out), python, out)
    print(f"| W{args.bits} g{args.group_size} | perplexity | KL | KL p99 | top-1 | CPU s | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name, (out, cost) in results.items():
        figures = evaluate(out, args.model, str(args.text), args.length, args.windows, args.out / "eval.log")
        print(
            f"| {name} | {figures['perplexity']:.2f} | {kl_with_interval(figures)} | "
            f"{figures['kl_p99']:.2f} | {figures['top1']:.1%} | {cost['cpu_s']:.0f} | {cost['peak_mb']:.0f} |"
        )


if __name__ == "__main__":
    main()
