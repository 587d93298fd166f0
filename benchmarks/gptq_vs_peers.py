"""Speed and memory of our GPTQ: against GPTQModel and llm-compressor, and as models and texts grow.

    python benchmarks/gptq_vs_peers.py compare MODEL --repeat 3 --evaluate --text TEST.txt --out compare.json
    python benchmarks/gptq_vs_peers.py growth --out growth.json

`compare` quantises MODEL to 4 bits, symmetric, groups of 64, with the same 128 x 512 token ids for all: packed from
`--calibration`, or all rows of `--ids FILE`. Every tool runs in a process of its own with all cores, one after another,
in `--repeat` rounds of ours, first peer, second peer; figures are medians. Before that each tool runs once on the tiny
model of the tests, since GPTQModel compiles a kernel on its first run (`--no-warm-up` leaves that out). A peer gets an
environment in `--environments`, unless `--peer NAME:PYTHON` names one. `--evaluate` decodes every tool's result to
float32 and has `llmcompress eval` judge it.

`growth` writes random llama checkpoints into `--work`, one at a time and removed afterwards, of every combination of
`--shapes`, `--layers` and `--windows` (TinyLlama's widths with 12 and 48 layers: 1.3 and 4.5 GB), quantises them and
prints what they took, what was fitted to that, and how much peak memory grows.

Wall time, CPU seconds and peak are those of whole processes, with Python's start and imports: what wait4 says of them.
MB are 10^6 bytes. Everything runs on the CPU.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from common import (
    HERE,
    OURS,
    PEERS,
    Cost,
    Job,
    decode,
    evaluate,
    install,
    kl_with_interval,
    last_json,
    machine,
    pack,
    positive,
    run,
    say,
    set_up,
    shape,
    split_peer,
)
from growth import add_options, growth

TINY = HERE.parent / "tests" / "models" / "tiny-llama"
OUR_NAME = "llmcompress"
FIGURES = tuple(Cost.__dataclass_fields__)
Facts = dict[str, Any]


def warm(model: Path) -> None:
    """Read the weights once, so that the first tool is not the only one to wait for the disk."""
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass


def quantise(job: Job, name: str, python: str, out: Path, form: str) -> tuple[Cost, str]:
    """One run of one tool into an empty place: what it took and the tool's version."""
    for path in (out, Path(f"{out}.work")):
        shutil.rmtree(path, ignore_errors=True)
    log = out.with_name(f"{out.name}.log")
    if name == OUR_NAME:
        version = run([*OURS, "--version"], log)[1].split()[-1]
        return run(job.ours("gptq", out, form), log)[0], version
    cost, printed = run(job.peer(name, python, out), log)
    return cost, last_json(printed)["version"]


def summary(tools: dict[str, Facts]) -> Facts:
    """Medians, and our cost as a multiple of the cheapest peer's."""
    medians = {
        name: {figure: median(one[figure] for one in facts["runs"]) for figure in FIGURES}
        for name, facts in tools.items()
        if facts["runs"]
    }
    result: Facts = {"medians": medians, "ratios": {}}
    peers = [row for name, row in medians.items() if name != OUR_NAME]
    if peers and len(medians) == len(tools):
        for figure in FIGURES:
            result["ratios"][figure] = medians[OUR_NAME][figure] / min(row[figure] for row in peers)
    return result


def show(facts: Facts) -> None:
    """The table and the ratios."""
    print("| tool | wall s | CPU s | peak MB | KL | perplexity |\n|---|---|---|---|---|---|")
    for name, row in facts["medians"].items():
        tool = facts["tools"][name]
        quality = "- | -"
        if "evaluation" in tool:
            seen = tool["evaluation"]
            quality = f"{kl_with_interval(seen)} | {seen['perplexity']:.2f}"
        costs = f"{row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['peak_mb']:.0f}"
        title, variant = (PEERS[name].title, PEERS[name].variant) if name in PEERS else (name, "gptq")
        print(f"| {title} {tool['version']}, {' '.join([variant, *tool['extra']])} | {costs} | {quality} |")
    counts = {name: tool["linears"] for name, tool in facts["tools"].items() if "linears" in tool}
    if len(set(counts.values())) > 1:
        sys.exit(f"NOT COMPARABLE, as the tools quantised different numbers of linears: {counts}")
    if facts["ratios"]:
        wall, cpu, peak = (facts["ratios"][figure] for figure in FIGURES)
        print(f"\nour wall / the faster peer's: {wall:.2f}; CPU / the cheaper peer's: {cpu:.2f};", end=" ")
        print(f"our peak / the smaller peer's: {peak:.2f}")


def compare(args: argparse.Namespace, work: Path, save: Callable[[Facts], None]) -> None:
    """Run all tools round by round, then evaluate what the last round made."""
    pythons = {OUR_NAME: OURS[0]}
    if not args.no_peers:
        for name, python in args.peer or map(split_peer, PEERS):
            pythons[name] = python or install(name, args.environments)
    ids = args.ids or pack(args.model, work / "ids.safetensors", args.calibration, args.samples, args.length)
    job = Job(args.model, ids, args.bits, args.group_size, tuple(args.option))
    if not args.no_warm_up:
        tiny = replace(job, model=TINY, ids=pack(TINY, work / "tiny.safetensors", "default", 4, 64))
        for name, python in pythons.items():
            say(f"warming up {name}")
            quantise(tiny, name, python, work / f"tiny-{name}", args.format)
    tools: dict[str, Facts] = {name: {"runs": [], "extra": []} for name in pythons}
    tools[OUR_NAME]["extra"] = args.option
    asked = {name: getattr(args, name) for name in ("bits", "group_size", "format", "option")}
    facts = {"model": str(args.model), "tokens": shape(ids), **asked, "machine": machine(), "tools": tools}
    warm(args.model)
    for number in range(args.repeat):
        for name, python in pythons.items():
            say(f"round {number + 1} of {args.repeat}: {name}")
            before = machine()["load"]
            cost, tools[name]["version"] = quantise(job, name, python, work / name, args.format)
            tools[name]["runs"].append({**asdict(cost), "load_before": before})
            say(f"{name}: {cost.wall_s:.1f} s, {cost.cpu_s:.1f} CPU s, {cost.peak_mb:.0f} MB at most")
            facts |= summary(tools)
            save(facts)
    for name, python in pythons.items() if args.evaluate else ():
        say(f"evaluating {name}")
        dense, tools[name]["linears"] = decode(python, work / name)
        log = work / "eval.log"
        tools[name]["evaluation"] = evaluate(dense, args.model, args.text, args.eval_length, args.windows, log)
        shutil.rmtree(dense)
        save(facts)
    show(facts)


def options() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--bits", type=int, default=4)
    shared.add_argument("--group-size", type=int, default=64)
    shared.add_argument("--format", default="gptq", help="of our result (%(default)s)")
    more = "another option of our gptq, such as --option=--actorder=group; repeatable"
    shared.add_argument("--option", action="append", default=[], metavar="--NAME=VALUE", help=more)
    shared.add_argument("--repeat", type=positive, default=1, metavar="N", help="median of N runs")
    shared.add_argument("--work", type=Path, help="for a folder of temporary files, removed at the end")
    shared.add_argument("--out", type=Path, metavar="FILE.json", help="everything measured, written after each run")
    whole = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=whole)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("compare", parents=[shared], help="speed and memory against the peers")
    one.add_argument("model", type=Path)
    one.add_argument("--ids", type=Path, help="token ids as `llmcompress calib pack` writes them; all rows are used")
    one.add_argument("--calibration", default="default", help="to pack ids from, as for `llmcompress calib pack`")
    one.add_argument("--samples", type=int, default=128)
    one.add_argument("--length", type=int, default=512)
    every = f"default: {' and '.join(PEERS)}"
    one.add_argument("--peer", action="append", type=split_peer, metavar="NAME[:PYTHON]", help=every)
    one.add_argument("--no-peers", action="store_true", help="ours alone")
    one.add_argument("--environments", type=Path, default=HERE / ".venvs", help="where peers are installed")
    one.add_argument("--no-warm-up", action="store_true")
    one.add_argument("--evaluate", action="store_true")
    one.add_argument("--text", default="default", help="to evaluate on; default: the text shipped with llmcompress")
    one.add_argument("--windows", type=int, default=40)
    one.add_argument("--eval-length", type=int, default=512)
    one.set_defaults(go=compare)
    two = commands.add_parser("growth", parents=[shared], help="how time and memory grow")
    add_options(two)
    two.set_defaults(go=growth)
    return parser


def main() -> None:
    args = options().parse_args()
    set_up(threads=None)

    def save(facts: Facts) -> None:
        if args.out:
            args.out.write_text(json.dumps(facts, indent=1) + "\n")

    for folder in filter(None, (args.work, args.out and args.out.parent)):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llmcompress-bench-", dir=args.work) as work:
        args.go(args, Path(work).resolve(), save)


if __name__ == "__main__":
    main()
