"""The texts and the table of benchmarks/domains.py."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import domains  # noqa: E402

SOURCE = '''"""What it is for."""


class A:
    """One
    thing."""

    x = 1


def f():
    "short"
    return 2
'''


def test_docstrings_and_code_share_no_line():
    tree = ast.parse(SOURCE)
    assert [ast.get_docstring(node) for node in domains.documented(tree)] == ["What it is for.", "One\nthing.", "short"]
    bare = domains.bare(SOURCE, tree)
    assert bare == "class A:\n\n    x = 1\n\ndef f():\n\n    return 2"


def test_modules_of_tests_and_wrong_files_are_left_out(tmp_path):
    for name in ("a.py", "test/b.py", "idle_test/c.py", "site-packages/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'"""{name} {"x" * 300}"""\n')
    (tmp_path / "wrong.py").write_text("print 1\n")
    assert domains.docstrings(tmp_path) == f"a.py {'x' * 300}"


def test_a_domain_is_many_modules(tmp_path):
    for number in range(5):
        (tmp_path / f"m{number}.py").write_text(f'"""{str(number) * 2 * domains.PER_MODULE}"""\n')
    found = domains.docstrings(tmp_path).split("\n\n")
    assert sorted(found) == [str(number) * domains.PER_MODULE for number in range(5)]


def test_the_ratio_pairs_windows_and_counts_domains_alike():
    first = [[1.0, 2.0, 9.0, 4.0], [10.0, 30.0]]
    halved = [[value / 2 for value in values] for values in first]
    assert domains.ratio(halved, first) == pytest.approx((0.5, 0.5, 0.5))  # the same windows are drawn for both
    assert domains.mean(first) == pytest.approx((4 + 20) / 2)
    shuffled = [[9.0, 1.0, 4.0, 2.0], [30.0, 10.0]]
    value, low, high = domains.ratio(shuffled, first)
    assert value == pytest.approx(1)
    assert low < 0.9
    assert high > 1.1


def test_the_table_says_the_worst_domain():
    found = {"a": {"code": [1.0, 3.0], "chat": [0.5]}, "b": {"code": [1.0, 1.0], "chat": [2.0]}}
    lines = domains.table(found).splitlines()
    assert lines[0].startswith("| KL (windows) | code (2) | chat (1) | mean | worst |")
    assert lines[2].startswith("| a | 2.0000 | 0.5000 | 1.2500 | 2.0000 | 1.000 (1.000 to 1.000) |")
    assert lines[3].startswith("| b | 1.0000 | 2.0000 | 1.5000 | 2.0000 | 1.200 (")
