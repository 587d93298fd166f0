"""How much faster ranks are: the same run by one process and by several, in turns, each with one thread.

    python benchmarks/ranks.py MODEL --text TEXT --folder FOLDER

Pairs are run one after the other, and every second one in the opposite order, so that what else the machine does falls
on both. Prints JSON: seconds of each run as it reports them (without the imports), their ratio pair by pair, CPU
seconds of each process (with the imports), and whether all files are the same to the byte. Where other work takes cores
meanwhile, ranks wait for one another's turn as well; the CPU seconds of the busiest rank are what cores of their own
would take at least.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ANEW, OURS, machine, positive, say, set_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--folder", type=Path, required=True, help="where outputs and logs go")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pairs", type=positive, default=2)
    parser.add_argument("--port", type=int, default=29533, help="of this machine, for the ranks to meet at")
    given = parser.parse_args()
    if given.ranks < 2:
        parser.error("--ranks: there is nothing to compare below 2")
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
        "one_rank_cpu_s": [one["cpu_s"][0] for one, _ in pairs],
        "ranks_cpu_s": [many["cpu_s"] for _, many in pairs],
        "cpu_ratio": [round(one["cpu_s"][0] / max(many["cpu_s"]), 3) for one, many in pairs],
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
    """Seconds of a run, CPU seconds of each of its processes, and a hash of its files."""
    out = given.folder / f"ranks-{size}"
    command = [*OURS, given.method, str(given.model), "-o", str(out), *ANEW, "--json", "--threads", "1"]
    command += ["--calibration", str(given.text), "--samples", str(given.samples), "--length", str(given.length)]
    spent = together(command, out, [environment(given.port, rank, size) for rank in range(size)])
    seconds = json.loads(out.with_suffix(".0.json").read_text())["seconds"]
    say(f"{size} ranks: {seconds} s, {spent} s of CPU, load {machine()['load']}")
    return {"seconds": seconds, "cpu_s": spent, "files": digest(out)}


def environment(port: int, rank: int, size: int) -> dict[str, str]:
    """What torchrun sets for a rank."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    return {**os.environ, **place, "WORLD_SIZE": str(size), "RANK": str(rank)}


def together(command: list[str], out: Path, environments: list[dict[str, str]]) -> list[float]:
    """CPU seconds of each of several processes that run a command side by side. Ends the script if one fails."""
    started = []
    for rank, variables in enumerate(environments):
        with out.with_suffix(f".{rank}.json").open("w") as printed, out.with_suffix(f".{rank}.log").open("w") as log:
            started.append(subprocess.Popen(command, stdout=printed, stderr=log, env=variables))
    spent = []
    try:
        for rank, child in enumerate(started):
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            spent.append(round(used.ru_utime + used.ru_stime, 2))
            if child.returncode:
                sys.exit(f"rank {rank} failed: {out.with_suffix(f'.{rank}.log').read_text()}")
    finally:
        for child in started:
            if child.returncode is None:
                child.kill()
                child.wait()
    return spent


def digest(folder: Path) -> str:
    """A hash of all files."""
    found = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
