"""The harness itself: an attempt that breaks a promise is found, and one that keeps all is not accused."""

import shutil

import pytest
from attempts import Attempt, Tally
from attempts import attack as make

pytestmark = pytest.mark.slow


@pytest.fixture
def wrongs(servers, tmp_path):
    """wrongs(attempt): what it broke."""

    def of(attempt):
        tally = Tally()
        try:
            make("harness", [attempt], folder=tmp_path, tally=tally, servers=servers)
        except AssertionError:
            assert tally.broken["harness"]
        return tally.broken["harness"]

    return of


RTN = ["rtn", "model", "-o", "out", "--bits", "4", "--group-size", "64"]


def test_harness(wrongs, tiny_model_dir):
    def copy(place):
        shutil.copytree(tiny_model_dir, place / "model")

    good = {"prepare": copy, "source": "model", "output": "out"}
    assert wrongs(Attempt("good", RTN, **good)) == []
    assert wrongs(Attempt("refused", [*RTN, "--bits", "99"], **good)) == []
    assert "exit code 2" in wrongs(Attempt("a code", ["plan", "rtn", "nowhere"], codes={0}))[0]
    assert "left behind: out" in wrongs(Attempt("left", RTN, prepare=copy))[0]
    assert "longer than" in wrongs(Attempt("slow", RTN, seconds=0.01, **good))[0]
    assert "MB of memory" in wrongs(Attempt("memory", RTN, memory=1, **good))[0]
    inside = {**good, "output": "model/out"}
    assert wrongs(Attempt("source", [*RTN, "-o", "model/out"], **inside)) == ["source: the source was changed"]
    assert wrongs(Attempt("limit", RTN, limits={"RLIMIT_FSIZE": 100_000}, codes={1}, left=["out.work"], **good)) == []
    assert wrongs(Attempt("closed", ["plan", "rtn", "nowhere"], closed=[2], codes={2})) == []
