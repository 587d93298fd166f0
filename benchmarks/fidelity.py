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
import os
import resource
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PEERS = {
    "gptqmodel": ("run_gptqmodel.py", ["--desc-act"], "GPTQModel, desc_act"),
    "llmcompressor": ("run_llmcompressor.py", [], "llm-compressor, static act-order"),
}


def spent() -> float:
    """CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command: list[str], log: Path) -> tuple[float, str]:
    """CPU seconds and standard output of a command; its standard error goes to `log`."""
    before = spent()
    with log.open("w") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed, see {log}")
    return spent() - before, done.stdout


def ours(args: argparse.Namespace, method: str) -> dict[str, object]:
    """One of our own results: {out, cpu_s, peak_mb}."""
    out = args.out / f"llmcompress-{method}-w{args.bits}"
    facts = out.with_suffix(".json")
    if not facts.exists():
        command = [
            sys.executable,
            "-m",
            "llmcompress",
            method,
            str(args.model),
            "-o",
            str(out),
            "--overwrite",
            "--json",
        ]
        command += ["--bits", str(args.bits), "--group-size", str(args.group_size), "--format", "dense"]
        command += ["--calibration", str(args.ids), "--samples", str(args.samples), "--length", str(args.length)]
        cpu, stdout = run(command, out.with_suffix(".log"))
        facts.write_text(json.dumps({"cpu_s": cpu, "peak_mb": json.loads(stdout)["peak_memory_bytes"] / 1e6}))
    return {"out": out, **json.loads(facts.read_text())}


def peer(args: argparse.Namespace, name: str, python: str) -> dict[str, object]:
    """A peer's result, decoded: {out, cpu_s, peak_mb}."""
    script, options, _ = PEERS[name]
    out = args.out / f"{name}-w{args.bits}"
    dense, facts = out.with_name(f"{out.name}-dense"), out.with_suffix(".json")
    if not facts.exists():
        command = [python, str(HERE / "peers" / script), str(args.model), str(args.ids), str(out)]
        command += ["--bits", str(args.bits), "--group-size", str(args.group_size), *options]
        _, stdout = run(command, out.with_suffix(".log"))
        run(
            [python, str(HERE / "peers" / "densify.py"), str(out), str(dense)],
            dense.with_suffix(".log"),
        )
        line = json.loads(stdout.strip().splitlines()[-1])
        facts.write_text(json.dumps({"cpu_s": line["cpu_s"], "peak_mb": line["peak_rss_mb"]}))
    return {"out": dense, **json.loads(facts.read_text())}


def main() -> None:
    """Make what is missing, evaluate everything, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME:PYTHON", help="gptqmodel or llmcompressor")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    args.out.mkdir(parents=True, exist_ok=True)
    results = {f"llmcompress {method}": ours(args, method) for method in ("gptq", "rtn")}
    for item in args.peer:
        name, _, python = item.partition(":")
        results[PEERS[name][2]] = peer(args, name, python)
    print(f"| W{args.bits} g{args.group_size} | perplexity | KL | KL p99 | top-1 | CPU s | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name, result in results.items():
        command = [sys.executable, "-m", "llmcompress", "eval", str(result["out"]), "--ref", str(args.model), "--json"]
        command += ["--text", str(args.text), "--length", str(args.length), "--windows", str(args.windows)]
        figures = json.loads(run(command, args.out / "eval.log")[1])
        low, high = figures["kl_ci"]
        print(
            f"| {name} | {figures['perplexity']:.2f} | {figures['kl']:.4f} ({low:.4f} to {high:.4f}) | "
            f"{figures['kl_p99']:.2f} | {figures['top1']:.1%} | {result['cpu_s']:.0f} | {result['peak_mb']:.0f} |"
        )


if __name__ == "__main__":
    main()
