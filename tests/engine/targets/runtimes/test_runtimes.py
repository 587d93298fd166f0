"""The files of runtimes: what each says of models and matrices, and that one file is all that a runtime takes."""

import json
import sys

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from entries import AWQ, DENSE, GPTQ, PACKED, W4, matrix, model
from llmcompress import registry
from llmcompress.engine.targets import runtimes
from llmcompress.engine.targets.base import targets
from llmcompress.engine.targets.model_facts import LackedTypes
from llmcompress.engine.targets.verdicts import engine_notes, verdicts, violations
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.grids.base import PER_ROW
from llmcompress.grids.integer import IntegerSpec

TARGETS = targets()
RUNTIME = """
from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.grid_facts import BitWidths

TARGET = Target(
    "abacus", "Abacus", "1.0", place=99, formats={"gptq": (BitWidths((2,), why="it takes 2 bits"),)}, remark="slow"
)
"""


@pytest.fixture
def one_file(tmp_path, monkeypatch):
    """A runtime in a file that was put beside the others."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "abacus.py").write_text(RUNTIME)
    monkeypatch.setattr(runtimes, "__path__", [*runtimes.__path__, str(tmp_path / "new")])
    registry.discover.cache_clear()
    yield
    registry.discover.cache_clear()
    sys.modules.pop(f"{runtimes.__name__}.abacus", None)


def test_a_runtime_in_a_file_of_its_own_is_listed_judged_and_chosen(one_file, main, capsys, tiny_model_dir, tmp_path):
    assert list(targets()) == [*TARGETS, "abacus"]
    assert main("list", "targets", "--json") == 0
    assert json.loads(capsys.readouterr().out)[-1] == {
        "target": "abacus",
        "as of": "1.0",
        "format": "gptq",
        "bits": "2",
        "asymmetric": "any",
        "groups": "any",
        "facts": "it takes 2 bits; slow",
    }
    plan = ["plan", "rtn", tiny_model_dir, "-o", tmp_path / "out", "--format", "gptq", "--group-size", "32"]
    assert main(*plan, "--bits", 2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["targets"]["abacus"] == "ok"
    assert main(*plan, "--bits", 4, "--json") == 0
    [reason] = json.loads(capsys.readouterr().out)["targets"]["abacus"]
    assert reason.startswith("it takes 2 bits, not 4")
    assert main(*plan, "--bits", 2, "--target", "abacus") == 0
    assert main(*plan, "--bits", 4, "--target", "abacus") == 2
    assert "Abacus does not load" in capsys.readouterr().err


def test_model_types_that_are_lost_are_refused_by_name():
    target = TARGETS["transformers"]
    expert, plain = ("model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.up_proj.weight")
    expert, plain = (
        [Entry(TensorSpec(name, "BF16", (128, 128)), W4, block=True, linear=True)] for name in (expert, plain)
    )

    def reasons(entries, model_type):
        return [item.what for item in violations(target, "compressed-tensors", entries, {"model_type": model_type})]

    [why] = reasons(plain, "falcon")
    assert "as in models of type 'falcon'" in why
    assert reasons(plain, "llama") == reasons(plain, "granitemoe") == []
    [why] = reasons(expert, "granitemoe")
    assert "random values" in why
    assert violations(target, "dense", plain, {"model_type": "falcon"}) == []
    for name in ("transformers", "llama.cpp"):
        [item] = violations(TARGETS[name], "dense", expert, {"model_type": "granitemoe"})
        assert "from the original" in item.by_hand
        assert violations(TARGETS[name], "dense", plain, {"model_type": "granitemoe"}) == []


def test_model_types_that_a_runtime_has_no_class_for_are_refused_in_every_format():
    plain = [Entry(TensorSpec("model.layers.0.mlp.up_proj.weight", "BF16", (128, 128)), W4, block=True, linear=True)]
    for name, format_, model_type, words in (
        ("vllm", "compressed-tensors", "bamba", "'bamba' among them: it has no class of its own"),
        ("vllm", "gptq", "mpt", "'mpt' among them"),
        ("sglang", "dense", "falcon", "'falcon' among them"),
        ("llama.cpp", "compressed-tensors", "axk1", "'axk1' among them: llama.cpp has no such architecture"),
        ("llama.cpp", "dense", "phimoe", "'phimoe' among them: llama.cpp computes its norms"),
    ):
        [item] = violations(TARGETS[name], format_, plain, {"model_type": model_type})
        assert words in item.what
        assert "list targets" in item.by_hand
    for name, model_type in (("vllm", "dots1"), ("sglang", "glm")):
        config = {"model_type": model_type}
        assert violations(TARGETS[name], "compressed-tensors", plain, config) == []
        notes = engine_notes("compressed-tensors", plain, config)
        assert any("not seen with quantised weights" in note for note in notes)
    for target in TARGETS.values():
        lacked = {name for fact in target.always if isinstance(fact, LackedTypes) for name in fact.lacked}
        assert not lacked & set(target.borrowed)
        assert lacked | set(target.borrowed) <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


# --- what the ledger says of engines when no target is named ---


@pytest.mark.parametrize("format_", [GPTQ, PACKED, DENSE])
def test_the_default_is_read_by_every_engine(format_):
    assert format_.refuses(model(), {}) is None
    assert engine_notes(format_.name, model(), {}) == []


@pytest.mark.parametrize(
    ("format_", "entries", "engines"),
    [
        (GPTQ, model({"": IntegerSpec(2, 32)}), ["vLLM", "SGLang"]),
        (GPTQ, model({"": IntegerSpec(3, 32)}), ["vLLM", "SGLang", "llama.cpp's converter"]),
        (GPTQ, model({"": IntegerSpec(4, 32, symmetric=False)}), ["vLLM", "SGLang"]),
        (GPTQ, model({"": IntegerSpec(4, 16)}), ["vLLM", "SGLang"]),
        (GPTQ, [matrix("m", IntegerSpec(4, 48), (128, 384))], ["transformers", "GPTQModel", "vLLM", "SGLang"]),
        (GPTQ, model({"down": IntegerSpec(8, 32)}), ["transformers", "llama.cpp's converter"]),
        (GPTQ, model({"q_proj": IntegerSpec(8, 32)}), ["transformers", "vLLM", "SGLang", "llama.cpp's converter"]),
        (GPTQ, model({"q_proj": None}), ["vLLM", "SGLang"]),
        (GPTQ, model(permuted=True), ["vLLM"]),
        (GPTQ, model({"": IntegerSpec(4, PER_ROW)}, permuted=True), []),
        (GPTQ, model(head=True), ["transformers"]),
        (GPTQ, [matrix("m", W4, (36, 128))], ["transformers", "vLLM", "SGLang"]),
        (GPTQ, [matrix("m", W4, (64, 160))], ["SGLang"]),
        (GPTQ, [matrix("model.layers.0.mlp.experts.0.up_proj")], ["transformers"]),
        (AWQ, model({"": IntegerSpec(4, 32, symmetric=False)}), []),
        (AWQ, model(dtype="F16"), []),
        (AWQ, model(), ["vLLM", "SGLang"]),  # bfloat16 without zero points
        (AWQ, model({"": IntegerSpec(4, PER_ROW)}, dtype="F16"), ["vLLM", "SGLang"]),
        (AWQ, model({"": IntegerSpec(4, 16, symmetric=False)}), ["transformers", "GPTQModel", "vLLM", "SGLang"]),
        (AWQ, [matrix("model.layers.0.mlp.experts.0.up_proj", IntegerSpec(4, 32, symmetric=False))], ["transformers"]),
        (PACKED, model({"": IntegerSpec(4, 32, symmetric=False)}), ["transformers"]),
        (PACKED, model({"": IntegerSpec(8, 32, symmetric=False)}), ["transformers"]),
        (PACKED, model({"": IntegerSpec(2, 32)}), ["SGLang"]),
        (PACKED, model({"": IntegerSpec(8, PER_ROW)}), ["llama.cpp's converter"]),
        (PACKED, model({"": IntegerSpec(4, 16)}), ["vLLM", "SGLang"]),
        (PACKED, model({"down": IntegerSpec(8, 32)}), ["llama.cpp's converter"]),
        (PACKED, model({"gate": None}), ["vLLM", "SGLang"]),
        (PACKED, [matrix("model.layers.0.mlp.experts.0.up_proj")], []),
        (
            PACKED,
            [
                matrix("model.layers.0.self_attn.o_proj"),
                matrix("model.layers.0.feed_forward.experts.gate_up_proj", None),
            ],
            ["transformers"],
        ),
        (GPTQ, [matrix("h.0.attn.c_attn", transposed=True)], ["transformers"]),
        (GPTQ, [matrix("model.layers.0.block_sparse_moe.experts.0.w1")], ["transformers", "GPTQModel"]),
        (GPTQ, [matrix("model.layers.0.mlp.gate_up_proj")], ["GPTQModel"]),
        (GPTQ, [matrix("gpt_neox.layers.0.mlp.dense_h_to_4h"), matrix("embed_out", None)], ["GPTQModel"]),
    ],
)
def test_engines_that_read_the_format_but_not_this_are_named_once_each(format_, entries, engines):
    assert format_.refuses(entries, {}) is None
    notes = engine_notes(format_.name, entries, {})
    assert [note.partition(" does not load this: ")[0] for note in notes] == engines
    verdict = verdicts(format_.name, entries, {})
    reading = [target for target in TARGETS.values() if format_.name in target.formats and target.unasked]
    assert [target.title for target in reading if verdict[target.name] != "ok"] == engines


def test_a_note_has_two_reasons_and_the_number_of_the_others():
    entries = model({"0.*q_proj": IntegerSpec(4, 64), "1.*q_proj": IntegerSpec(8, 64), "gate": IntegerSpec(8, 128)})
    reasons = verdicts(PACKED.name, entries, {})["vllm"]
    (note,) = (note for note in engine_notes(PACKED.name, entries, {}) if note.startswith("vLLM"))
    assert len(reasons) > 2
    assert note == f"vLLM does not load this: {'; '.join(reasons[:2])}; and {len(reasons) - 2} more"
