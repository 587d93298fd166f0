"""The published schemas are those of the documents, and strict; what is written follows them.

What commands print with --json is held to theirs in every test: conftest.py.
"""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from jsonschema import Draft202012Validator, ValidationError

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.kernels import bench
from llmcompress.kernels.check import Checked
from llmcompress.recipe import parse
from llmcompress.report import schemas
from llmcompress.report.cells import METRICS, cells_of
from llmcompress.report.page import render
from llmcompress.report.page_inputs import read_outputs
from llmcompress.report.schemas import SCHEMAS, schema_text
from llmcompress.report.schemas.printed import PRINTED, CheckedKernels, TimedKernels


def validator(name):
    return Draft202012Validator(json.loads(schema_text(name)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schema_is_that_of_the_code(name):
    published = Path(schemas.__file__).parent / f"{name}.schema.json"
    assert published.read_text() == schemas.made(name), (
        f'write it anew: python -c "from llmcompress.report.schemas import made; print(made({name!r}), end=str())"'
        f" > {published}"
    )
    Draft202012Validator.check_schema(json.loads(published.read_text()))


def test_the_command_prints_the_published_schema(main, capsys):
    for name in SCHEMAS:
        assert main("schema", name) == 0
        assert capsys.readouterr().out == schema_text(name)
    assert main("schema", "repor") == 2
    assert "did you mean 'report'" in capsys.readouterr().err


@pytest.mark.parametrize("name", PRINTED)
def test_what_a_command_prints_has_a_schema_that_knows_null_for_figures_that_are_not_finite(main, capsys, name):
    assert main("schema", *name.split()) == 0
    found = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(found)
    assert '"number"' not in re.sub(r'\["number",\s*"null"\]', "", json.dumps(found))


@pytest.mark.parametrize(("name", "kind"), [(CheckedKernels, Checked), (TimedKernels, bench.TimedProduct)])
def test_what_is_said_of_kernels_is_what_they_are_measured_by(name, kind):
    """What no test prints, since it takes a GPU."""
    (rows,) = (field.annotation for field in name.model_fields.values() if "list" in str(field.annotation))
    (row,) = get_args(rows)
    assert set(row.model_fields) - {"ok"} == {field.name for field in fields(kind)}


def test_every_document_that_is_written_follows_its_schema(made):
    for name, out in made.outputs.items():
        report = out.with_name("small.gguf.report.json") if name == "small.gguf" else out / "report.json"
        validator("report").validate(json.loads(report.read_text()))
        validator("evaluation").validate(json.loads(made.evaluations[name].read_text()))
    lines = [json.loads(line) for line in made.timings.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", *["layer"] * 4, "end"] * 3
    for line in lines:
        validator("timings").validate(line)


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report.update(seconds=3),
        lambda report: report.pop("linears"),
        lambda report: report.update(schema_version=2),
        lambda report: report["linears"][0].update(extra=1),
        lambda report: report["linears"][0].update(shape=[4]),
        lambda report: report["linears"][0].update(relative_error=-1),
        lambda report: report["tensors"].update(x="not a hash"),
        lambda report: report["recipe"].update(extra=1),
        lambda report: report["ledger"].append({"kind": "x"}),
    ],
)
def test_the_schema_refuses_what_no_report_holds(made, change):
    report = json.loads((made.outputs["four"] / "report.json").read_text())
    change(report)
    with pytest.raises(ValidationError):
        validator("report").validate(report)


def test_pruned_matrices_have_their_place(tiny_model_dir, tmp_path):
    steps = [{"method": "wanda", "pattern": "2:4"}, {"method": "gptq", "bits": 4, "group_size": 64}]
    for number, chain in enumerate((steps, steps[:1])):
        out = tmp_path / str(number)
        output = {"format": "compressed-tensors" if len(chain) > 1 else "dense"}
        recipe = parse({"calibration": {"samples": 2, "length": 32}, "steps": chain, "output": output})
        run(make_plan(recipe, tiny_model_dir, Options(out=out)))
        (found,) = read_outputs([out], [], [])
        for linear in found.report.linears:
            assert (linear.pruner, linear.pattern) == ("wanda", "2:4")
            assert linear.sparsity >= 0.5
            assert linear.rtn_ratio is None
        zeros = next(metric for metric in METRICS if metric.key == "sparsity")
        assert cells_of(found.report.linears).knows(zeros)
        assert "<h3>Zeros</h3>" in render([found])
