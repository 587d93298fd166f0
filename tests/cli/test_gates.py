"""`--junit`: XML that CI systems read, however a command ends, the same bytes every time."""

import re
import shutil
from xml.etree import ElementTree

import pytest

from llmcompress.cli.gates import GateCase, Gates, gated, write_junit
from llmcompress.errors import GateError, PlanError, RunError, StoppedError
from tinyruns import digest

RTN = ["--bits", 8, "--group-size", 32]
EVAL = ["--length", 16, "--windows", 2]
# of the schema that Jenkins' xUnit plugin and GitLab go by: children and attributes of every element
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testcase", "properties", "system-out", "system-err"},
    "testcase": {"skipped", "error", "failure", "system-out", "system-err"},
    **{leaf: set() for leaf in ("skipped", "error", "failure", "system-out", "system-err")},
}
ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time"},
    "testcase": {"name", "time", "classname"},
    **{result: {"type", "message"} for result in ("skipped", "error", "failure")},
    **{text: set() for text in ("system-out", "system-err")},
}


def cases(file):
    """State, message and text of every test case by name, of a file that keeps to the schema."""
    root = ElementTree.parse(file).getroot()
    assert root.tag == "testsuites"
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN[element.tag]
        assert set(element.attrib) <= ATTRIBUTES[element.tag]
    found = {}
    for suite in root:
        assert {"name", "tests", "failures", "errors"} <= set(suite.attrib)
        assert re.fullmatch(r"\d+(\.\d+)?", suite.get("time", "0"))
        for case in suite:
            assert case.get("name")
            assert case.get("classname")
            results = [child for child in case if child.tag not in ("system-out", "system-err")]
            assert len(results) <= 1
            state = results[0].tag if results else "passed"
            message = results[0].get("message") if results else ""
            found[case.get("name")] = (state, message, case.findtext("system-out") or "")
        states = [state for state, _, _ in found.values()]
        assert int(suite.get("tests")) == len(suite) == len(found)
        for attribute, state in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.get(attribute)) == states.count(state)
    return found


def test_a_run_that_passes_fails_its_gate_is_refused_stops_and_fails(main, random_model_dir, tmp_path):
    model, file, out = random_model_dir("llama"), tmp_path / "run.xml", tmp_path / "out"
    command = ["rtn", model, "-o", out, *RTN, "--junit", file]
    assert main(*command, "--deadline", 0, "--strict", "damping") == 75
    found = cases(file)
    assert found["rtn"][:2] == ("skipped", "stopped at a safe point")
    assert found["--strict damping"][:2] == ("skipped", "not reached")
    section = next(tmp_path.glob("out.work/section-*.safetensors"))
    whole = section.read_bytes()
    section.write_bytes(whole[:-8])
    assert main(*command) == 1
    assert "is damaged" in cases(file)["rtn"][1]
    assert cases(file)["rtn"][0] == "error"
    section.write_bytes(whole)
    assert main(*command, "--strict", "damping") == 0
    assert cases(file) == {"rtn": ("passed", "", ""), "--strict damping": ("passed", "", "measured: 0\nbound: 0")}
    first = file.read_bytes()
    assert main(*command, "--overwrite", "--strict", "damping") == 0
    assert file.read_bytes() == first
    assert main(*command) == 2
    assert cases(file)["rtn"][0] == "error"
    assert "already exists" in cases(file)["rtn"][1]
    before = digest(out)
    skipping = [*command, "--overwrite", "--set", "o_proj: {skip: true}"]
    assert main(*skipping, "--strict", "unquantised", "--strict", "damping") == 3
    assert digest(out) == before
    found = cases(file)
    assert found["rtn"][0] == found["--strict damping"][0] == "passed"
    assert found["--strict unquantised"][0] == "failure"
    assert "skipped as asked" in found["--strict unquantised"][1]
    assert found["--strict unquantised"][2] == "measured: 2\nbound: 0"
    assert list(tmp_path.glob("*.partial")) == []
    assert main(*skipping) == 0  # from the work that is there
    assert digest(out) != before
    assert not (tmp_path / "out.work").exists()


def test_every_gate_of_eval_is_a_case(main, capsys, tiny_model_dir, tmp_path):
    file = tmp_path / "eval.xml"
    gates = ["--fail-if", "kl > 1", "--fail-if", "perplexity>1", "--fail-if", "top1 < 0.5"]
    assert main("eval", tiny_model_dir, "--ref", tiny_model_dir, *EVAL, *gates, "--junit", file) == 3
    found = cases(file)
    assert found["eval"][0] == found["--fail-if kl > 1"][0] == found["--fail-if top1 < 0.5"][0] == "passed"
    assert found["--fail-if kl > 1"][2] == "measured: 0.0\nbound: not kl > 1"
    state, message, detail = found["--fail-if perplexity>1"]
    assert state == "failure"
    assert message.endswith("the gate was perplexity > 1")
    assert re.fullmatch(r"measured: [\d.]+\nbound: not perplexity > 1", detail)
    assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ("klx > 1", "which is not measured did you mean 'kl'"),
        ("kl > 1", "which needs the original give it as --ref"),
        ("kl", "is not a condition"),
    ],
)
def test_a_gate_that_cannot_be_judged_is_refused_before_anything_is_measured(
    gate, words, main, capsys, tmp_path, tiny_model_dir, monkeypatch
):
    monkeypatch.setattr("llmcompress.validate.session.evaluate_paths", None)
    ref = ["--ref", tiny_model_dir] if "klx" in gate else []
    assert main("eval", tiny_model_dir, *ref, "--fail-if", gate, "--junit", tmp_path / "eval.xml") == 2
    assert words in " ".join(capsys.readouterr().err.replace("hint: ", "").split())
    assert cases(tmp_path / "eval.xml")["eval"][0] == "error"


def test_every_check_of_verify_is_a_case(main, tiny_model_dir, tmp_path):
    out, file = tmp_path / "out", tmp_path / "verify.xml"
    assert main("rtn", tiny_model_dir, "-o", out, "--group-size", 64) == 0
    assert main("verify", out, "--source", tiny_model_dir, "--junit", file) == 0
    found = cases(file)
    assert {"verify", "files", "hashes", "matrices", "source", "bound"} <= set(found)
    assert {state for state, _, _ in found.values()} == {"passed"}
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-1000] ^= 4
    (out / "model.safetensors").write_bytes(data)
    assert main("verify", out, "--junit", file) == 3
    assert cases(file)["hashes"][0] == "failure"
    assert "is not what was written" in cases(file)["hashes"][1]
    assert main("verify", tmp_path / "missing", "--junit", file) == 2
    assert cases(file)["verify"][0] == "error"


def test_several_outputs_have_gates_of_their_own(main, tiny_model_dir, tmp_path):
    file = tmp_path / "gguf.xml"
    kinds = ["--type", "Q8_0", "--type", "Q4_0", "--strict", "damping"]
    assert main("gguf", tiny_model_dir, "-o", tmp_path / "out.gguf", *kinds, "--junit", file) == 0
    assert set(cases(file)) == {
        "gguf",
        "out-Q8_0.gguf: --strict damping",
        "out-Q4_0.gguf: --strict damping",
    }


@pytest.mark.parametrize(
    ("place", "words"),
    [("missing/x.xml", "there is no directory"), ("folder", "is not a file"), ("link", "not a file")],
)
def test_a_place_that_cannot_be_is_refused_before_anything_runs(place, words, main, capsys, random_model_dir, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert main("rtn", random_model_dir("llama"), "-o", tmp_path / "out", *RTN, "--junit", tmp_path / place) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link"]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (StoppedError("stop"), "skipped"),
        (RunError("failed"), "error"),
        (PlanError("refused"), "error"),
        (MemoryError(), "error"),
        (KeyboardInterrupt(), "error"),
        (GateError("gate"), "failure"),  # of no gate that was judged
    ],
)
def test_it_is_written_however_a_command_ends(error, state, tmp_path):
    def work():
        with gated("work", tmp_path / "a.xml") as gates:
            gates.expect(["first", "second"])
            gates.judge("first", True, 1, 2, "")
            raise error

    with pytest.raises(type(error)):
        work()
    found = cases(tmp_path / "a.xml")
    assert {name: case[0] for name, case in found.items()} == {"work": state, "first": "passed", "second": "skipped"}


def test_names_and_messages_of_strangers_are_escaped(tmp_path):
    gates = Gates("work")
    gates.judge('a <"&> \x1b[31m', False, "\x00", "\ud800", "]]> \x07 <![CDATA[")
    write_junit(tmp_path / "a.xml", gates)
    [(name, (state, message, detail))] = [item for item in cases(tmp_path / "a.xml").items() if item[0] != "work"]
    assert (name, state) == ('a <"&> \\x1b[31m', "failure")
    assert message == "]]> \\x07 <![CDATA["
    assert detail == "measured: \\x00\nbound: \\ud800"


def test_a_file_that_cannot_be_replaced_stays_whole(tmp_path, monkeypatch):
    gates = Gates("work")
    write_junit(tmp_path / "a.xml", gates)
    before = (tmp_path / "a.xml").read_bytes()
    gates.add(GateCase("more", "passed"))
    (tmp_path / "a.xml.partial").mkdir()
    (tmp_path / "a.xml.partial" / "letters").touch()
    with pytest.raises(PlanError, match="is in the way"), gated("work", tmp_path / "a.xml"):
        pass
    with pytest.raises(PlanError, match="is in the way"):
        write_junit(tmp_path / "a.xml", gates)
    assert (tmp_path / "a.xml").read_bytes() == before
    shutil.rmtree(tmp_path / "a.xml.partial")
    write_junit(tmp_path / "a.xml", gates)
    assert set(cases(tmp_path / "a.xml")) == {"work", "more"}
