"""What the commands do with every model type: the table of docs/models.md.

    python benchmarks/models.py WORK [--types TYPE ...] [--again COLUMN ...] [--write docs/models.md]

Makes the tiny checkpoints of zoo.py in WORK, runs the commands on each in forked processes, keeps what came of it in
WORK/models.json, and goes on from there when it is started again; --again measures columns anew. About 15 s for a type.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo import known_types, zoo

import llmcompress.engine.execute
import llmcompress.validate.session
import llmcompress.validate.verify  # noqa: F401  what the processes use is imported once
from llmcompress.calib.default import shipped
from llmcompress.cli.app import main as command_line

TEXT = ["--samples", "32", "--length", "64", "--compute-dtype", "float32"]  # the same on every processor
GRID = ["--bits", "4", "--group-size", "32"]
WINDOWS, LENGTH = 4, 64  # of evaluations
SECONDS = 300  # after which a command counts as hanging
PLANNED = {
    "gptq": ["gptq", *GRID, *TEXT],
    "awq": ["awq", *GRID, *TEXT],
    "gguf": ["gguf", "--type", "Q8_0"],
}
BEGIN, END = "<!-- table: python benchmarks/models.py -->", "<!-- end of table -->"
Row = dict[str, Any]


def forked(work: Callable[[], object], place: Path) -> tuple[int | None, str, str]:
    """The exit code, stdout and stderr of `work` in a process of its own."""

    def child() -> None:
        for number, name in enumerate(("stdout", "stderr"), 1):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        try:
            work()
        except Exception:
            traceback.print_exc()
            sys.exit(70)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    out, err = ((place / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return process.exitcode, out, err


def command(place: Path, *words: object) -> tuple[int | None, str, str]:
    """What a command of llmcompress gives."""

    def work() -> None:
        sys.argv = ["llmcompress", *map(str, words)]
        command_line()

    return forked(work, place)


def reason(err: str) -> str:
    """The error of a command, without the places in it."""
    lines = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    return (lines[0] if lines else err.strip().splitlines()[-1] if err.strip() else "no reason").strip()


def ran(place: Path, model: Path, *words: object, ending: str = "") -> Row:
    """A command planned, run and verified. says: ok, refused, failed, or what was wrong."""
    output = place / f"out{ending}"
    for old in place.glob("out*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    run = [words[0], model, "-o", output, *words[1:]]
    planned, out, planning = command(place, *run, "--dry-run", "--json")
    code, _, err = command(place, *run, "-q")
    plan = json.loads(out) if planned == 0 else None
    said = {} if plan is None else {"share": plan["decoder_share"], "promised": plan["targets"]["transformers"] == "ok"}
    if planned == 2 and code == 2:
        return {"says": "refused", "why": reason(err)}
    if (planned, code) != (0, 0):
        return {"says": "failed", "why": f"plan {planned}, run {code}: {reason(err or planning)}"}
    verified, _, err = command(place, "verify", output, "--source", model)
    if verified:
        return {"says": "failed", "why": f"verify {verified}: {reason(err)}", **said}
    return {"says": "ok", **said}


def divergence(place: Path, model: Path) -> float | None:
    """The KL divergence from the original by `eval`, None where it says none."""
    text = ["--text", place.parent / "text.txt", "--windows", WINDOWS, "--length", LENGTH]
    code, out, _ = command(place, "eval", place / "out", "--ref", model, *text, "--json", "-q")
    return float(json.loads(out)["kl"]) if code == 0 else None


def loaded(place: Path, model: Path) -> float | str:
    """The KL divergence from the original by transformers' own loading, or why there is none."""

    def work() -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = torch.tensor(tokenizer((place.parent / "text.txt").read_text())["input_ids"])
        windows = ids[: WINDOWS * LENGTH].reshape(WINDOWS, LENGTH)
        kinds = {"dtype": torch.float32}
        with torch.no_grad():
            ours, whole = (
                AutoModelForCausalLM.from_pretrained(path, **kinds)(windows).logits[:, :-1].double().log_softmax(-1)
                for path in (place / "out", model)
            )
        print(json.dumps(float((whole.exp() * (whole - ours)).sum(-1).mean())))

    code, out, err = forked(work, place)
    return float(out.splitlines()[-1]) if code == 0 else reason(err)


def gptq(place: Path, model: Path) -> Row:
    """The columns of gptq: run, decoder share, KL divergence beside rtn's, loading."""
    rounded = ran(place, model, "rtn", *GRID)
    plain = divergence(place, model) if rounded["says"] == "ok" else None
    row = ran(place, model, *PLANNED["gptq"])
    if row["says"] == "ok":
        row |= {"kl": divergence(place, model), "rtn": plain, "loads": loaded(place, model)}
    return row


COLUMNS: Mapping[str, Callable[[Path, Path], Row]] = {
    "gptq": gptq,
    "awq": lambda place, model: ran(place, model, *PLANNED["awq"]),
    "gguf": lambda place, model: ran(place, model, *PLANNED["gguf"], ending=".gguf"),
}


def measure(work: Path, kinds: list[str], again: list[str]) -> dict[str, Row]:
    """Every column of every type, kept as it comes."""
    file, place = work / "models.json", work / "runs"
    found: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    place.mkdir(parents=True, exist_ok=True)
    (work / "text.txt").write_text("\n".join(text.read_text() for text in sorted(shipped("eval_data").glob("*.txt"))))
    for kind, model in zoo(work / "zoo", kinds):
        row = found.setdefault(kind, {})
        for column, run in COLUMNS.items():
            if column not in row or column in again:
                row[column] = run(place, model)
                print(kind, column, row[column], flush=True)
                file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return found


def loads(row: Row) -> bool:
    """Whether transformers loads an output and computes what its codes say."""
    told = row.get("loads")
    return isinstance(told, float) and row["kl"] is not None and abs(told - row["kl"]) <= max(0.03 * row["kl"], 2e-3)


def counts(found: Mapping[str, Row]) -> dict[str, int]:
    """What of all types works."""
    rows = [row["gptq"] for row in found.values()]
    done = [row for row in rows if row["says"] == "ok"]
    return {
        "types": len(rows),
        "gptq and verify": len(done),
        "loads in transformers": sum(map(loads, done)),
        "loads or does not, as plan says": sum(row["promised"] == loads(row) for row in done),
        "at least 90% of the decoder": sum(row["share"] >= 0.9 for row in done),
        "KL at most that of rtn": sum(None not in (row["kl"], row["rtn"]) and row["kl"] <= row["rtn"] for row in done),
        "awq and verify": sum(row["awq"]["says"] == "ok" for row in found.values()),
        "gguf and verify": sum(row["gguf"]["says"] == "ok" for row in found.values()),
        "plan yes, run no": sum(row[name]["says"] == "failed" for row in found.values() for name in COLUMNS),
    }


def table(found: Mapping[str, Row]) -> list[str]:
    """The table in Markdown, with the counts above it and the reasons of refusals below it."""
    lines = ["| | types |", "| --- | ---: |", *(f"| {name} | {count} |" for name, count in counts(found).items()), ""]
    lines += [
        "| type | gptq | decoder | KL / rtn's | loads | awq | gguf |",
        "| --- | --- | ---: | ---: | --- | --- | --- |",
    ]
    whys: dict[str, list[str]] = {}
    for kind, row in sorted(found.items()):
        made = row["gptq"]
        for column in COLUMNS:
            if "why" in row[column]:
                why = re.sub(r"\S*/zoo/TYPE/", "", f"{column}: {row[column]['why'].replace(kind, 'TYPE')}")
                whys.setdefault(why, []).append(kind)
        good = made["says"] == "ok"
        known = good and None not in (made["kl"], made["rtn"])
        cells = [
            kind,
            made["says"],
            f"{made['share']:.1%}" if good else "",
            f"{made['kl'] / made['rtn']:.2f}" if known else "",
            ("yes" if loads(made) else "no") if good else "",
            row["awq"]["says"],
            row["gguf"]["says"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What was refused, and why:", ""]
    lines += [f"- {why} ({', '.join(kinds)})" for why, kinds in sorted(whys.items())]
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--types", nargs="+", default=known_types())
    parser.add_argument("--again", nargs="+", default=[], choices=COLUMNS)
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    given = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:  # a forked process waits for ever for threads that the one before had
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    rows = measure(given.work, given.types, given.again)
    print(json.dumps(counts(rows)))
    if given.write:
        page = given.write.read_text()
        if not 0 <= page.find(BEGIN) < page.find(END):
            sys.exit(f"{given.write} has no table between {BEGIN} and {END}")
        before, _, rest = page.partition(BEGIN)
        given.write.write_text("\n".join([before + BEGIN, "", *table(rows), "", END + rest.partition(END)[2]]))
