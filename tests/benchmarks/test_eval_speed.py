"""What benchmarks/eval_speed.py runs, and its table."""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import eval_speed


def test_all_score_the_same_windows(tmp_path):
    places = {"model": Path("m"), "out": Path("o"), "text": Path("t"), "work": tmp_path, "tools": tmp_path}
    given = Namespace(**places, lm_eval=Path("python"), type="Q4_0", length=128, windows=7, threads=1)
    found = {name: list(map(str, command)) for name, command in eval_speed.commands(given)}
    assert len(found) == 8
    for name, words in found.items():
        peer = name.startswith("llama")
        assert (
            words[words.index("-c" if peer else "--length") + 1] == "128" if name != "lm-eval" else words[-2] == "128"
        )
        assert (
            words[words.index("--chunks" if peer else "--windows") + 1] == "7"
            if name != "lm-eval"
            else words[-1] == "7"
        )
    assert found["filling"] == found["filled"]
    given.lm_eval = None
    assert "lm-eval" not in dict(eval_speed.commands(given))


def test_ratios_are_of_one_round_each():
    def cost(cpu):
        return {"wall_s": 2 * cpu, "cpu_s": cpu, "peak_mb": 100.0}

    rounds = [{eval_speed.FIRST: cost(first), "filled": cost(other)} for first, other in ((10, 5), (40, 4), (20, 16))]
    assert eval_speed.table(rounds).splitlines()[2:] == [
        "| without a cache | 40.0 | 20.0 | 1.00 | 100 |",
        "| filled | 10.0 | 5.0 | 0.50 | 100 |",
    ]
