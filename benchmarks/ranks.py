"""How much faster ranks are: the same run by one process and by several, in turns, each with one thread.

    python benchmarks/ranks.py MODEL --text TEXT --folder FOLDER

Pairs are run one after the other, and every second one in the opposite order, so that what else the machine does falls
on both. Prints JSON: seconds of each run as it reports them (without the imports), their ratio pair by pair, and
whether all files are the same to the byte.
"""

import argparse
import hashlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import OURS, machine, run, say, set_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--folder", type=Path, required=True, help="where outputs and logs go")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--port", type=int, default=29533, help="of this machine, for the ranks to meet at")
    given = parser.parse_args()
    set_up(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    pairs = [pair(given, number) for number in range(given.pairs)]
    speedups = [one["seconds"] / many["seconds"] for one, many in pairs]
    result = {
        "machine": machine(),
        "method": given.method,
        "windows": [given.samples, given.length],
        "ranks": given.ranks,
        "one_rank_s": [one["seconds"] for one, _ in pairs],
        "ranks_s": [many["seconds"] for _, many in pairs],
        "speedup": [round(ratio, 3) for ratio in speedups],
        "median_speedup": round(statistics.median(speedups), 3),
        "same_bytes": len({result["files"] for both in pairs for result in both}) == 1,
    }
    print(json.dumps(result))
    if not result["same_bytes"]:
        sys.exit("outputs differ")


def pair(given: argparse.Namespace, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One run by one process and one by several; odd pairs begin with the several."""
    sizes = (1, given.ranks) if number % 2 == 0 else (given.ranks, 1)
    found = {size: measured(given, size) for size in sizes}
    return found[1], found[given.ranks]


def measured(given: argparse.Namespace, size: int) -> dict[str, Any]:
    """Seconds of a run, and a hash of its files."""
    out = given.folder / f"ranks-{size}"
    command = [*OURS, given.method, str(given.model), "-o", str(out), "--overwrite", "--json", "--threads", "1"]
    command += ["--calibration", str(given.text), "--samples", str(given.samples), "--length", str(given.length)]
    if size > 1:
        place = ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(given.port)]
        start = [sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node", str(size)]
        command = [*start, *command[1:]]
    cost, printed = run(command, out.with_suffix(".log"))
    seconds = json.loads(printed)["seconds"]
    say(f"{size} ranks: {seconds} s, {cost.wall_s} s with imports, load {machine()['load']}")
    return {"seconds": seconds, "files": digest(out)}


def digest(folder: Path) -> str:
    """A hash of all files."""
    found = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
