"""The script that measures on a GPU runs without one, so that it is ready when there is one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_bench  # noqa: E402
import gpu_parts  # noqa: E402


def bench(tmp_path, seconds=60.0):
    return gpu_bench.Bench(tmp_path, gpu_bench.DRY, "cpu", time.monotonic() + seconds)


@pytest.mark.slow
def test_every_part_runs_dry_and_says_what_was_not_measured(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", tmp_path, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["part"] for row in rows} >= {
        "checkpoint",
        "links",
        "check",
        "codes",
        "gptq",
        "eval",
        "packing",
        "large",
    }
    assert [row for row in rows if row["what"] == "failed"] == []
    missing = [row["part"] for row in rows if "needs a GPU" in row["what"]]
    assert missing == ["links", "check", "bench"]
    assert [row["value"] for row in rows if row["part"] == "codes"] == ["0 (0.0000%)"]
    assert done.stdout.splitlines()[0] == "| part | what | value | bar | met |"
    assert len(done.stdout.splitlines()) == len(rows) + 2
    assert not list(tmp_path.glob("*.work"))


def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path, monkeypatch):
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"

    def slow(bench):
        bench.call(1.5, sys.executable, "-c", child, tmp_path / "pid")
        yield gpu_bench.Row("slow", "never", "said")

    def broken(bench):
        yield gpu_bench.Row("broken", "one figure", "1")
        raise KeyError("another")

    def quick(bench):
        yield gpu_bench.Row("quick", "figure", "2", "> 1", True)

    monkeypatch.setattr(gpu, "PARTS", {"slow": slow, "broken": broken, "quick": quick})
    seen = []
    rows = gpu.carried_out(bench(tmp_path), ["slow", "broken", "quick"], lambda rows: seen.append(len(rows)))
    assert [(row.part, row.what) for row in rows] == [
        ("slow", "failed"), ("broken", "one figure"), ("broken", "failed"), ("quick", "figure"),
    ]  # fmt: skip
    assert "ended after" in rows[0].value
    assert seen == [1, 2, 3, 4]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert gpu.table(rows).splitlines()[-1] == "| quick | figure | 2 | > 1 | yes |"


def test_no_part_begins_when_the_time_is_over(tmp_path):
    rows = gpu.carried_out(bench(tmp_path, -1), ["check"], lambda rows: None)
    assert rows == [gpu_bench.Row("check", "failed", "not measured: PartError: no time was left for it", met=False)]


def test_time_for_all_layers_is_extrapolated_and_said_to_be():
    part = gpu_parts.Compressed(wall=50.0, layers=[9.0, 4.0, 4.0], count=10, peak=None, driver=0)
    assert part.seconds == 50 + 7 * 4
    assert part.said == "78 s, extrapolated from 3 of 10 layers"
    assert gpu_parts.Compressed(50.0, [1.0] * 10, 10, None, 0).said == "50 s"


def test_bars_are_judged_by_the_worst_of_what_was_timed():
    def timed(name, tokens, of_copy, times, size=30_000_000):
        return {"name": name, "tokens": tokens, "of_copy": of_copy, "times_bf16": times, "bytes": size}

    products = [
        timed("w4 g128", 1, 0.9, 3.6),
        timed("w4 g128", 8, 0.79, 3.4),
        timed("w4 g128", 1, 0.1, 3.5, size=1000),  # too small to count for bandwidth
        timed("w4 g128", 32, 0.7, 2.0),
        timed("w8a8", 512, 0.2, 1.6),
    ]
    rows = {row.what: row for row in gpu_parts.kernel_rows(products)}
    met = [row.met for row in rows.values()]
    assert met == [False, True, True, True, True, None]
    assert rows["w4 g128, 1-8 rows, 20 MB and more: share of a copy's rate, least"].value == "79%"
