"""The script that measures on a GPU runs without one, so that it is ready when there is one."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_kernels  # noqa: E402
import gpu_parts  # noqa: E402

from emulated import COMPILER  # noqa: E402

ORDER = ["machine", "check", "bench", "eval", "gptq", "codes", "packing", "large"]


def lines_of(*arguments):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stdout.splitlines()]


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.slow
def test_every_part_runs_dry_in_its_order_and_nothing_is_judged(tmp_path):
    lines = lines_of(tmp_path, "--dry-run")
    assert [json.loads(text) for text in (tmp_path / "gpu.jsonl").read_text().splitlines()] == lines
    assert list(dict.fromkeys(line["part"] for line in lines)) == ORDER
    assert [line for line in lines if "error" in line] == []
    assert lines[0]["dry_run"]
    assert {"gpu", "driver", "torch", "cuda", "compiler", "nvcc", "version", "commit", "missing"} <= set(lines[0])
    barred = {(line["part"], line["name"]): line for line in lines if "bar" in line}
    assert {line["met"] for line in barred.values()} == {None}
    nulls = {key[1] for key, line in barred.items() if line[line["bar"].split()[0]] is None}
    too_small = {name for name in gpu.BARS["bench"] if "large" in name or "512" in name}
    assert nulls == {*too_small, "memory of tensors", "memory by the driver"}
    found = {(line["part"], line.get("name")): line for line in lines}
    assert found["check", "kernels"]["wrong"] == found["check", "memcheck"]["errors"] == 0
    assert found["codes", "codes"]["differing"] == 0
    assert {"w4 g128, 16 x 256", "w8a8, 16 x 256", "Q4_K, 16 x 256"} <= {name for _, name in found}
    table = (tmp_path / "gpu.md").read_text()
    assert "| bench | w8a8, 512 rows | not reached | least_times_bf16 >= 1.5 |  |" in table
    (tmp_path / "gpu.md").unlink()
    assert lines_of(tmp_path, "--table") == []
    assert (tmp_path / "gpu.md").read_text() == table


def test_without_a_gpu_each_part_names_what_is_missing_and_the_next_one_runs(tmp_path):
    lines = lines_of(tmp_path, "--only", "large", "check")  # whatever the order they are named in
    errors = [line for line in lines if "error" in line]
    assert [line["part"] for line in errors] == ["check", "large"]
    assert all("torch" in line["error"] for line in errors)
    figures = [(line["name"], line["met"]) for line in lines if "error" not in line]
    assert figures == [("kernels", None), ("memcheck", None), ("two layers", None)]


def test_a_part_out_of_time_leaves_its_lines_and_nulls(tmp_path, monkeypatch):
    def eternal(setting):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (tmp_path / "pid").write_text(str(child.pid))
        yield {"name": "kernels", "wrong": 1}
        time.sleep(60)

    def broken(setting):
        yield {"name": "w8a8, 512 rows", "least_times_bf16": 1.6}
        raise KeyError("another")

    def killed(setting):
        os.kill(os.getpid(), signal.SIGKILL)
        yield {}

    def quick(setting):
        yield {"name": "time", "seconds": 12.0}

    monkeypatch.setattr(gpu_parts, "PARTS", {"check": eternal, "bench": broken, "eval": killed, "gptq": quick})
    monkeypatch.setattr(gpu, "SHARES", {"check": 2, "bench": 20, "eval": 20, "gptq": 20, "large": -100})
    begin = time.monotonic()
    lines = list(gpu.measured(get_context("fork"), gpu.SHARES, tmp_path, dry=False))
    assert time.monotonic() - begin < 15
    by_part = {part: [line for line in lines if line["part"] == part] for part in gpu.SHARES}
    assert [line["met"] for line in by_part["check"]] == [False, None]
    assert by_part["check"][1] == {
        "part": "check",
        "name": "memcheck",
        "errors": None,
        "bar": "errors <= 0",
        "met": None,
    }
    assert by_part["bench"][:2] == [
        {
            "part": "bench",
            "name": "w8a8, 512 rows",
            "least_times_bf16": 1.6,
            "bar": "least_times_bf16 >= 1.5",
            "met": True,
        },
        {"part": "bench", "error": "KeyError: 'another'"},
    ]
    assert "ended with -9" in by_part["eval"][0]["error"]
    assert by_part["gptq"][0]["met"] is True
    assert by_part["large"] == [{"part": "large", "name": "two layers", "seconds": None, "met": None}]
    status = Path("/proc", (tmp_path / "pid").read_text(), "stat")  # what a part started is ended with it
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_errors_that_the_sanitizer_finds_are_counted(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    setting = gpu.Setting(tmp_path, dry=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not on the PATH" in gpu_kernels._memcheck(setting)["error"]
    for said, code, found in (("2 errors", 1, 2), ("0 errors", 0, 0), ("0 errors", 1, None), ("", 0, None)):
        tool.write_text(f"#!/bin/sh\necho '{said and 'ERROR SUMMARY: ' + said}'\nexit {code}\n")
        tool.chmod(0o755)
        line = gpu_kernels._memcheck(setting)
        assert line.get("errors") == found
        assert ("error" in line) == (found is None)
    tool.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "benchmarks", ROOT / "src"))))
    assert "NVIDIA GPU" in gpu_kernels._memcheck(setting)["error"]


def test_the_shares_stay_below_nine_minutes_and_every_bar_stands_in_the_documents():
    assert sum(gpu.SHARES.values()) <= 530
    assert list(gpu.SHARES) == list(gpu.BARS) == list(gpu_parts.PARTS) == ORDER
    rows = [line.split(" | ") for line in (ROOT / "docs" / "gpu.md").read_text().splitlines() if " | " in line]
    shown = {(row[1], row[3]) for row in rows if len(row) == 5}
    barred = {(name, str(bar)) for bars in gpu.BARS.values() for name, bar in bars.items() if bar.limit < 1e9}
    assert barred <= shown


def test_time_for_all_layers_is_extrapolated():
    assert gpu_parts.extrapolated(50.0, [9.0, 4.0, 4.0], 10) == 50 + 7 * 4
    assert gpu_parts.extrapolated(50.0, [1.0] * 10, 10) == 50


def test_bars_are_judged_by_the_worst_of_what_was_timed():
    def timed(name, tokens, of_copy, times, size=30_000_000):
        return SimpleNamespace(name=name, tokens=tokens, of_copy=of_copy, times_bf16=times, bytes=size)

    products = [
        timed("w4 g128", 1, 0.9, 3.6),
        timed("w4 g128", 8, 0.79, 3.4),
        timed("w4 g128", 1, 0.1, 1.5, size=1000),  # too small to count for large ones
        timed("w4 g128", 32, 0.7, 2.0),
        timed("w8a8", 512, 0.2, 1.6),
    ]
    found = {line["name"]: line for line in gpu_kernels.summed(products)}
    bars = gpu.BARS["bench"]
    met = {name: bars[name].met(line[bars[name].figure]) for name, line in found.items()}
    assert met == {
        "w4 g128, 1 to 8 rows, large": False,
        "w4 g128, 16 and 32 rows, large": True,
        "w4 g128, 1 to 16 rows, large": True,
        "w4 g128, all rows": True,
        "w8a8, 512 rows": True,
    }
