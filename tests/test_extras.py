"""What the core does where the libraries of its extras are not installed."""

import sys
from importlib.util import find_spec

import pytest

from llmcompress import extras


@pytest.fixture
def missing(monkeypatch):
    """Makes a library look as if nobody had installed it."""

    def hide(library):
        monkeypatch.setitem(sys.modules, library, None)  # importing it fails
        monkeypatch.setattr(extras, "find_spec", lambda name: None if name == library else find_spec(name))

    return hide


def test_a_saved_data_set_is_refused_by_plan_and_run_alike(missing, main, shallow_model_dir, tmp_path, capsys):
    missing("datasets")
    table = tmp_path / "rows.parquet"
    table.write_bytes(b"PAR1")
    asked = ["gptq", shallow_model_dir, "--calibration", table, "-o", tmp_path / "out"]
    for words in (asked, ["plan", *asked]):
        assert main(*words) == 2
        told = f"error: reading {table} needs the datasets library, which is not installed\n"
        assert capsys.readouterr().err.endswith(f"{told}  hint: pip install 'llmcompress[data]'\n")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
