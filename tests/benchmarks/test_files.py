"""Each command that `benchmarks/files.py` measures runs, on its small model, and the table says what a rate is."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import files


@pytest.mark.slow
def test_every_command_runs_and_what_it_wrote_is_removed(tmp_path):
    model = files.made(tmp_path, "tiny", 1)
    found = files.seconds(model, tmp_path, repeat=1)
    assert set(found) == set(files.commands(model, tmp_path))
    assert all(cpu > 0 and wall > 0 for name, (cpu, wall, _) in found.items() if name not in ("cp", "sha256sum"))
    read = {name: size for name, (_, _, size) in found.items()}
    assert read["inspect"] == 0 < read["verify"] < read["rtn"] < read["verify --source"]
    assert read["export"] > 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"tiny-1", "model.log", "command.log"}


def test_rates_are_of_the_bytes_and_seconds_by_which_the_models_differ():
    size = 4_001_000_000
    large = {
        "cp": (1.0, 1.0, size),
        "sha256sum": (5.0, 5.0, size),
        "rtn": (12.0, 12.0, size),
        "verify": (9.0, 9.0, size),
    }
    small = {name: (1.0 if name != "cp" else 0.0, 1.0, 1_000_000) for name in large}
    lines = files.table(large, small)
    rows = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines.splitlines()[2:])}
    assert rows["sha256sum"][2:4] == ["1.000", "1.00"]
    assert rows["rtn"][2:] == ["0.364", "0.36", "no"]
    assert rows["verify"][2:] == ["0.500", "0.50", "yes"]
