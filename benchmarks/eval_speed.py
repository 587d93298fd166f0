"""How fast `eval` is beside llama-perplexity --kl-divergence and lm-evaluation-harness, on the same windows.

    bash scripts/interop/build_llama_cpp.sh BUILD
    python benchmarks/eval_speed.py MODEL OUT TEXT --tools BUILD/bin --lm-eval VENV/bin/python --work runs/

MODEL is the original, OUT what llmcompress made of it. Each round runs all of these, one after the other:

without a cache   eval OUT --ref MODEL: both models
filling           the same with an empty --ref-cache
filled            the same with that cache: what every further variant costs
filled, float32   the same with --compute-dtype float32, beside a cache of that
llama.cpp base    llama-perplexity of MODEL as F16, which writes logits to compare with
llama.cpp kl      llama-perplexity --kl-divergence of MODEL as --type, beside those: what every further variant costs
lm-eval           log-likelihoods of the windows by lm-evaluation-harness, of MODEL alone, where --lm-eval is given

A row is the median over rounds; ratios are medians of the ratios of each round, to the first row. llama-perplexity
scores the second half of each window alone, and lm-evaluation-harness compares with nothing. Rounds that are in the
work folder already are not run again.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, OURS, Results, machine, positive, run, set_up

FIRST, FILLING = "without a cache", "filling"
CACHE = "cache"


def commands(args: argparse.Namespace) -> Iterator[tuple[str, list[object]]]:
    """What a round runs, by name."""
    cut = ("--length", args.length, "--windows", args.windows)
    ours = [*OURS, "eval", args.out, "--ref", args.model, "--text", args.text, *cut, "--json"]
    cache = args.work / CACHE
    yield FIRST, ours
    yield FILLING, [*ours, "--ref-cache", cache]
    yield "filled", [*ours, "--ref-cache", cache]
    exact = [*ours, "--ref-cache", cache, "--compute-dtype", "float32"]
    yield "filling, float32", exact
    yield "filled, float32", exact
    # tensors repacked for AMX end llama-perplexity in a fault on some machines
    perplexity = [args.tools / "llama-perplexity", "--no-repack", "-t", args.threads, "-f", args.text]
    perplexity += ["-c", args.length, "--chunks", args.windows, "--kl-divergence-base", args.work / "logits", "-m"]
    yield "llama.cpp base", [*perplexity, args.work / "F16.gguf"]
    yield "llama.cpp kl", [*perplexity, args.work / f"{args.type}.gguf", "--kl-divergence"]
    if args.lm_eval is not None:
        peer = [args.lm_eval, HERE / "peers" / "run_lm_eval.py", args.model, args.text]
        yield "lm-eval", [*peer, args.length, args.windows]


def table(rounds: list[dict[str, dict[str, Any]]]) -> str:
    """As Markdown; rounds: the cost of every command by name."""
    lines = ["| | wall s | CPU s | CPU, ratio | peak MB |", "|---|---|---|---|---|"]
    for name in rounds[0]:
        wall, cpu, peak = (median(one[name][key] for one in rounds) for key in ("wall_s", "cpu_s", "peak_mb"))
        ratio = median(one[name]["cpu_s"] / one[FIRST]["cpu_s"] for one in rounds)
        lines.append(f"| {name} | {wall:.1f} | {cpu:.1f} | {ratio:.2f} | {peak:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Make the GGUF files, run what is missing of the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tools", type=Path, required=True, help="folder with llama-perplexity")
    parser.add_argument("--type", default="Q4_K_M", help="of the variant that llama.cpp runs")
    parser.add_argument("--lm-eval", type=Path, metavar="PYTHON")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    set_up(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    for kind in ("F16", args.type):
        file = args.work / f"{kind}.gguf"
        if not file.exists():
            run([*OURS, "gguf", str(args.model), "--type", kind, "-o", str(file), "-q"], args.work / "gguf.log")
    of = ("model", "out", "text", "type", "length", "windows", "threads")
    results = Results(args.work / "rounds.json", args, *of)
    rounds = []
    for number in range(args.rounds):
        costs = {}
        for name, command in commands(args):

            def measured(command: list[object] = command, name: str = name) -> dict[str, Any]:
                if name == FILLING:
                    shutil.rmtree(args.work / CACHE, ignore_errors=True)
                cost, said = run(list(map(str, command)), args.work / f"{name}.log")
                (args.work / f"{name}.out").write_text(said)
                return {**asdict(cost), **machine()}

            costs[name] = results.once(f"{number} {name}", measured)
        rounds.append(costs)
    print(table(rounds))
    outs = [json.loads((args.work / f"{name}.out").read_text()) for name in (FIRST, FILLING, "filled")]
    same = [one.pop("ref_cache", None) for one in outs] == [None, "miss", "hit"] and outs[0] == outs[1] == outs[2]
    if not same:
        sys.exit("figures with a cache are NOT equal to those without")
    print("figures with a cache are equal to those without")


if __name__ == "__main__":
    main()
