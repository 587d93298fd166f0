"""The tables of docs/scaling.md are those that its script prints."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_planned_cost_is_what_the_script_counts():
    script = ROOT / "benchmarks" / "scale.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert printed.count("\n\n") == 5
    for found in printed.strip().split("\n\n"):
        assert found in (ROOT / "docs" / "scaling.md").read_text()
