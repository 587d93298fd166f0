"""One layer of experts in a real model's shapes: time and memory of our GPTQ against llm-compressor's.

    python benchmarks/moe_layer.py --shape qwen3-30b-a3b --repeat 3 --out moe.json

Both quantise the same random layer (random_experts.py) to 4 bits, symmetric, groups of 128, on the same token ids, each
in a process of its own with all cores, in rounds of ours and the peer's; figures are medians. The peer calibrates every
expert on the tokens that its router sends it, as we do; by its default (`--all-tokens`) it would use all tokens, which
costs it 16 times as much. Its weights are loaded in the type that it is fastest in: bfloat16 where the processor has
instructions for it, else float32. It gets an environment in `--environments`, unless `--peer PYTHON` names one.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, Cost, Job, install, machine, positive, run, say, set_up

PEER = "llmcompressor"


def quantised(job: Job, name: str, python: str | None, work: Path, all_tokens: bool) -> Cost:
    """One run of a tool into an empty place."""
    out, log = work / name, work / f"{name}.log"
    for path in (out, Path(f"{out}.work")):
        shutil.rmtree(path, ignore_errors=True)
    if python is None:
        return run(job.ours("gptq", out, "compressed-tensors"), log)[0]
    return run([*job.peer(PEER, python, out), *([] if all_tokens else ["--routed-tokens"])], log)[0]


def main() -> None:
    whole = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=whole)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="of random_experts.py (%(default)s)")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeat", type=positive, default=1, metavar="N")
    parser.add_argument("--option", action="append", default=[], metavar="--NAME=VALUE", help="another of our gptq")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--no-peer", action="store_true", help="ours alone")
    parser.add_argument("--all-tokens", action="store_true", help="let the peer calibrate experts on all tokens")
    parser.add_argument("--environments", type=Path, default=HERE / ".venvs")
    parser.add_argument("--work", type=Path, help="for a folder of temporary files, removed at the end")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    set_up(threads=None)
    for folder in filter(None, (args.work, args.out and args.out.parent)):
        folder.mkdir(parents=True, exist_ok=True)
    tools: dict[str, str | None] = {"llmcompress": None}
    if not args.no_peer:
        tools[PEER] = args.peer or install(PEER, args.environments)
    with tempfile.TemporaryDirectory(prefix="llmcompress-bench-", dir=args.work) as folder:
        work = Path(folder).resolve()
        text = ["--samples", str(args.samples), "--length", str(args.length)]
        made = [sys.executable, str(HERE / "random_experts.py"), args.shape, str(work / "model"), *text]
        run(made, work / "made.log")
        job = Job(work / "model", work / "model" / "ids.safetensors", 4, 128, tuple(args.option))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in tools}
        for number in range(args.repeat):
            for name, python in tools.items():
                say(f"round {number + 1} of {args.repeat}: {name} (load {machine()['load']})")
                runs[name].append(asdict(quantised(job, name, python, work, args.all_tokens)))
                if args.out:
                    args.out.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    print("| tool | wall s | CPU s | peak MB |\n|---|---|---|---|")
    medians = {name: {key: median(one[key] for one in found) for key in found[0]} for name, found in runs.items()}
    for name, row in medians.items():
        print(f"| {name} | {row['wall_s']:.0f} | {row['cpu_s']:.0f} | {row['peak_mb']:.0f} |")
    if PEER in medians:
        ratios = (f"{key} {medians['llmcompress'][key] / row:.2f}" for key, row in medians[PEER].items())
        print(f"\nours / the peer's: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
