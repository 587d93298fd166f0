"""Everything that wants a GPU, in one go of under eight minutes: what was measured, and which bars it meets.

    python benchmarks/gpu.py FOLDER [--minutes 8] [--only NAME ...]

Writes random checkpoints of real shapes into FOLDER (some 35 GB at once; left there for another go), then checks and
times the kernels, compresses, compares codes with the processor's and evaluates. Every part has a time of its own and
is ended when that is over; rows are printed as they come, and FOLDER/gpu.json is written after each. A run that has no
time for all layers stops after some, and its time for all is said to be extrapolated. The table comes last. With
--dry-run everything is tiny and on the processor, and what only a GPU can do is listed as not measured.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from common import say
from gpu_bench import DRY, ROOT, Bench, NoGpuError, Row, Sizes
from gpu_parts import PARTS

MARGIN = 10  # seconds kept for the table


def carried_out(bench: Bench, names: list[str], watch: Callable[[list[Row]], None]) -> list[Row]:
    """Rows of all parts; one that fails is a row that says so. watch: shown all rows after each."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        watch(rows)

    for name in names:
        say(f"{name}, {bench.end - time.monotonic():.0f} s left")
        try:
            for row in PARTS[name](bench):
                add(row)
        except NoGpuError as error:
            add(Row(name, "needs a GPU", f"not measured: {error}"))
        except Exception as error:  # whatever it is: the parts after it are to be measured too
            add(Row(name, "failed", f"not measured: {type(error).__name__}: {error}", met=False))
    return rows


def table(rows: list[Row]) -> str:
    """Rows as Markdown."""
    words = {True: "yes", False: "NO", None: ""}
    head = ["| part | what | value | bar | met |", "| --- | --- | --- | --- | --- |"]
    lines = [f"| {row.part} | {row.what} | {row.value} | {row.bar} | {words[row.met]} |" for row in rows]
    return "\n".join([*head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=7.8)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model-layers", type=int, help="fewer than the model has")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    sizes = DRY if args.dry_run else replace(Sizes(), layers=args.model_layers)
    end = time.monotonic() + 60 * args.minutes - MARGIN
    bench = Bench(args.folder.resolve(), sizes, "cpu" if args.dry_run else "cuda", end)

    def watch(rows: list[Row]) -> None:
        say(" ".join(filter(None, (rows[-1].part, rows[-1].what, rows[-1].value, rows[-1].bar))))
        (args.folder / "gpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")

    print(table(carried_out(bench, args.only, watch)))


if __name__ == "__main__":
    main()
