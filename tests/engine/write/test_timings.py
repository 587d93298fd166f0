"""Times and memory go into a file of their own, line by line over all starts, and into nothing else."""

import json
import os

import pytest
from pydantic import TypeAdapter

from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.write.report_schema import Timing
from llmcompress.engine.write.timings import Timings, run_sha256
from llmcompress.errors import RunError, StoppedError
from llmcompress.report.page_inputs import Timed
from tinyruns import LAYERS, after, compress, digest, recipe


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lines_of_all_starts_follow_one_another_and_the_output_has_no_times(tiny_model_dir, tmp_path):
    file = tmp_path / "new" / "timings.jsonl"
    made = recipe("rtn")
    plan = make_plan(made, tiny_model_dir, Options(out=tmp_path / "out"))
    ticks = iter(range(100))
    with pytest.raises(StoppedError):
        compress(tiny_model_dir, plan.out, made, after(3), Timings(file, plan, Progress(), lambda: next(ticks)))
    timed = Timings(file, plan, Progress(), lambda: next(ticks))
    compress(tiny_model_dir, plan.out, made, progress=timed)
    timed.end()
    found = lines(file)
    assert [(line["event"], line.get("layer", line.get("done"))) for line in found] == [
        ("start", 0), ("layer", 0), ("layer", 1), ("layer", 2), ("start", 3), ("layer", 3), ("end", None)
    ]  # fmt: skip
    assert [line["seconds"] for line in found if line["event"] == "layer"] == [1] * LAYERS
    assert (found[-1]["seconds"], found[-1]["writing"]) == (3, 1)
    assert all(line["peak_memory_bytes"] > 1e7 for line in found if line["event"] != "start")
    compress(tiny_model_dir, tmp_path / "untimed", made)
    assert digest(plan.out) == digest(tmp_path / "untimed")


def test_a_run_is_known_by_its_report(tiny_model_dir, tmp_path):
    file, plan = tmp_path / "lines", make_plan(recipe("rtn"), tiny_model_dir, Options(out=tmp_path / "out"))
    compress(tiny_model_dir, plan.out, recipe("rtn"), progress=Timings(file, plan, Progress()))
    report = json.loads((plan.out / "report.json").read_text())
    known = run_sha256(report["source"]["headers_sha256"], report["recipe"], report["compute_dtype"])
    assert lines(file)[0]["run"] == known
    other = make_plan(recipe("rtn", bits=8), tiny_model_dir, Options(out=tmp_path / "other"))
    assert run_sha256(other.headers.fingerprint, other.recipe.as_data(), other.dtype) != known


def test_everything_is_passed_on(tiny_model_dir, tmp_path):
    class Heard(Progress):
        def __init__(self):
            self.calls = []

        def __getattribute__(self, name):
            if name in vars(Progress) and not name.startswith("_"):
                return lambda *_: self.calls.append(name)
            return object.__getattribute__(self, name)

    made = recipe(guided=True)
    heard, plan = Heard(), make_plan(made, tiny_model_dir, Options(out=tmp_path / "out"))
    compress(tiny_model_dir, plan.out, made, progress=Timings(tmp_path / "lines", plan, heard))
    assert set(heard.calls) == {name for name in vars(Progress) if not name.startswith("_")}
    before, *layers = [line for line in lines(tmp_path / "lines") if line["event"] != "start"]
    assert (before["event"], {line["event"] for line in layers}) == ("gradients", {"layer"})
    read = Timed()
    for line in lines(tmp_path / "lines"):
        read.add(TypeAdapter(Timing).validate_json(json.dumps(line)))
    assert read.seconds == pytest.approx(sum(line["seconds"] for line in (before, *layers)))


def test_a_place_inside_of_what_is_written_is_refused_before_anything_is_computed(
    main, capsys, tiny_model_dir, tmp_path
):
    out = tmp_path / "out"
    for place in (out, out / "times", tmp_path / "out.work" / "times", tmp_path):
        assert main("rtn", tiny_model_dir, "-o", out, "--timings", place, "--quiet") == 2
        assert f"--timings {place} " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_another_name_is_not_written_to(main, capsys, tiny_model_dir, tmp_path):
    kept, file = tmp_path / "kept", tmp_path / "times"
    kept.write_text("precious")
    os.link(kept, file)
    assert main("rtn", tiny_model_dir, "-o", tmp_path / "out", "--timings", file, "--quiet") == 2
    assert f"--timings {file} " in capsys.readouterr().err
    plan = make_plan(recipe("rtn"), tiny_model_dir, Options(out=tmp_path / "out"))
    with pytest.raises(RunError, match="second name"):  # of a link that is planted later
        Timings(file, plan, Progress()).start(1, 0)
    assert kept.read_text() == "precious"


def test_the_option_writes_what_the_page_reads(main, tiny_model_dir, tmp_path):
    arguments = ["rtn", tiny_model_dir, "-o", tmp_path / "out", "--quiet", "--timings", tmp_path / "lines"]
    assert main(*arguments) == 0
    assert [line["event"] for line in lines(tmp_path / "lines")] == ["start", *["layer"] * LAYERS, "end"]
    page = tmp_path / "page.html"
    assert main("report", tmp_path / "out", "--timings", tmp_path / "lines", "-o", page) == 0
    assert 'id="seconds"' in page.read_text()
