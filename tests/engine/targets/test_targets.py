"""What runtimes load: each of their facts passes and refuses a plan, and a repair gives a plan that passes."""

import json
import re
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from entries import W4
from forkserver import call
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.targets.base import targets
from llmcompress.engine.targets.machine import Devices, Machine, OnGpus
from llmcompress.engine.targets.model_facts import LostTypes
from llmcompress.engine.targets.verdicts import violations
from llmcompress.errors import PlanError, RecipeError
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.grids.base import PER_ROW
from llmcompress.grids.integer import IntegerSpec
from llmcompress.recipe import parse


@dataclass(frozen=True)
class Passing:
    """A case of targets.yaml that each of its targets loads."""

    case: str
    targets: list[str]
    model: dict = field(default_factory=dict)
    recipe: dict = field(default_factory=dict)
    tp: int = 1
    gpu: str | None = None
    remark: str = ""


@dataclass(frozen=True)
class Refused:
    """A case of targets.yaml that its target does not load."""

    case: str
    target: str
    words: str
    model: dict = field(default_factory=dict)
    recipe: dict = field(default_factory=dict)
    tp: int = 1
    gpu: str | None = None
    repaired: dict | None = None


TARGETS = targets()
TABLE = yaml.safe_load(Path(__file__).with_name("targets.yaml").read_text())
PASSING = [Passing(**case) for case in TABLE["passing"]]
REFUSED = [Refused(**case) for case in TABLE["refused"]]


# --- checkpoints that are nothing but headers: the data is a hole in the file ---

KEYS = {"hidden": "hidden_size", "inter": "intermediate_size", "heads": "num_attention_heads", "head": "head_dim"}
KEYS |= {
    "kv": "num_key_value_heads",
    "layers": "num_hidden_layers",
    "experts": "num_local_experts",
    "vocab": "vocab_size",
    "moe": "moe_intermediate_size",
}
SIZES = {
    "llama": {"hidden": 1024, "inter": 1536, "heads": 8, "kv": 4, "head": 128},
    "mixtral": {"hidden": 256, "inter": 512, "heads": 4, "kv": 4, "experts": 3},
    "qwen3_moe": {"hidden": 256, "inter": 512, "heads": 4, "kv": 4, "moe": 128},
    "phi3": {"hidden": 512, "inter": 1024, "heads": 4, "kv": 2},
    "gpt_neox": {"hidden": 512, "inter": 2048, "heads": 4},
    "gpt2": {"hidden": 768, "heads": 12},
}


def headers_only(folder, family="llama", dtype="BF16", **sizes):
    """A model directory as transformers would save it, with a file of the right size and no data in it."""
    from transformers import AutoConfig

    from llmcompress.arch import find
    from llmcompress.model.skeleton import skeleton

    spec = find(family)
    sizes = {KEYS[key]: size for key, size in {"layers": 2, **SIZES[family], **sizes}.items()}
    values = {**spec.tiny, "vocab_size": 64, "tie_word_embeddings": False, **sizes}
    config = AutoConfig.for_model(family, **values)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    header, end = {}, 0
    for name, tensor in skeleton(config, spec).named_parameters():
        begin, end = end, end + {"F32": 4}.get(dtype, 2) * tensor.numel()
        header[on_disk(name, spec)] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)
    return folder


def on_disk(name, spec):
    module, _, leaf = name.rpartition(".")
    if not module.startswith(f"{spec.layers}."):
        return f"{spec.disk_path(module)}.{leaf}"
    number, _, path = module.removeprefix(f"{spec.layers}.").partition(".")
    return f"{spec.layers}.{number}.{spec.disk_path(path)}.{leaf}"


@pytest.fixture(scope="session")
def headers_of(tmp_path_factory):
    """headers_of(family="llama", **sizes): a model directory without data. Read-only."""
    root, made = tmp_path_factory.mktemp("headers"), {}

    def make(**sizes):
        key = repr(sorted(sizes.items()))
        if key not in made:
            made[key] = headers_only(root / str(len(made)), **sizes)
        return made[key]

    return make


def recipe(format="compressed-tensors", method="gptq", kv_cache=None, **options):  # noqa: A002
    steps = [{"method": method, "bits": 4, **options}]
    cached = None if kv_cache is None else {"code": kv_cache}
    return parse({"calibration": {"length": 64}, "steps": steps, "output": {"format": format}, "kv_cache": cached})


def noted(plan, kind):
    return [entry for entry in plan.ledger if entry.kind == kind]


def matrices(plan):
    """What a plan makes of each matrix, and in which format."""
    found = {
        m.module: (m.entry.grid, m.entry.inputs, m.entry.permuted, m.method.name)
        for layer in plan.layers
        for m in layer
    }
    return plan.format.name, found


def planned(made, model, out, **options):
    return make_plan(made, model, Options(out=out, **options))


# --- plans that pass ---


@pytest.mark.parametrize(
    ("target", "case"),
    [pytest.param(target, case, id=f"{case.case}: {target}") for case in PASSING for target in case.targets],
)
def test_what_a_target_loads_is_planned_as_asked(headers_of, tmp_path, target, case):
    model, made = headers_of(**case.model), recipe(**case.recipe)
    tp = case.tp if TARGETS[target].tensor_parallel else 1
    plain = planned(made, model, tmp_path / "out")
    for repair in (False, True):
        held = planned(made, model, tmp_path / "out", target=target, tp=tp, gpu=case.gpu, repair=repair)
        assert matrices(held) == matrices(plain)
        assert held.recipe == plain.recipe
        assert held.identity == plain.identity
        told = bool(TARGETS[target].remark) and plain.format.name != "dense"
        said = [entry for entry in noted(held, "target") if not case.remark or case.remark not in entry.why]
        assert [entry.subject for entry in said] == [target] * told
        assert len(noted(held, "target")) == len(said) + bool(case.remark)


# --- plans that do not ---


def test_a_repair_leaves_other_steps_as_they_are(headers_of, tmp_path):
    steps = [{"method": "magnitude", "sparsity": 0.5}, {"method": "rtn", "group_size": 16}]
    made = parse({"calibration": {"length": 64}, "steps": steps, "output": {"format": "compressed-tensors"}})
    mended = planned(made, headers_of(), tmp_path / "out", target="vllm", repair=True)
    assert [step.name for step in mended.recipe.steps] == ["magnitude", "rtn"]
    assert mended.recipe.steps[1].group_size == 32
    assert all(matrix.pruner is not None for matrix in mended.matrices)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.case)
def test_what_a_target_does_not_load_is_refused_or_repaired(headers_of, tmp_path, case):
    model, made = headers_of(**case.model), recipe(**case.recipe)
    target, mended = case.target, case.repaired
    machine = {"tp": case.tp, "gpu": case.gpu}
    out = tmp_path / "out"
    plain = planned(made, model, out)
    with pytest.raises(PlanError) as refused:
        planned(made, model, out, target=target, **machine)
    assert refused.value.exit_code == 2
    assert case.words in refused.value.message
    assert refused.value.message.startswith(f"{TARGETS[target].title} does not load ")
    assert "\n" not in refused.value.message
    assert refused.value.hint
    assert ("--repair" in refused.value.hint) == (mended is not None)
    if mended is None:
        with pytest.raises(PlanError) as again:
            planned(made, model, out, target=target, **machine, repair=True)
        assert str(again.value) == str(refused.value)
        return

    held = planned(made, model, out, target=target, **machine, repair=True)
    format_, found = matrices(held)
    assert format_ == mended.get("format", plain.format.name)
    for pattern, name in mended.items():
        if pattern == "format":
            continue
        modules = [m for m in matrices(plain)[1] if re.search(pattern, m)]
        assert modules
        for module in modules:
            assert (found[module][0].name if module in found else None) == name, module
    # the ledger says what was done, the recipe does it again without a target, and the target takes it as it is
    notes = [entry for entry in noted(held, "target") if entry.subject != target]
    assert notes
    assert all("loads it: " in note.why for note in notes)
    written = parse(held.recipe.as_data())
    assert matrices(planned(written, model, out)) == matrices(held)
    again = planned(written, model, out, target=target, **machine)
    assert matrices(again) == matrices(held)
    assert not [entry for entry in noted(again, "target") if entry.subject != target]
    assert held.identity["recipe"] == planned(written, model, out).identity["recipe"]


def test_only_what_is_at_fault_is_changed(headers_of, tmp_path):
    model = headers_of(inter=1536)
    held = planned(recipe(), model, tmp_path / "out", target="vllm", tp=8, repair=True)
    [step] = held.recipe.steps
    assert step.set == {"mlp.down_proj": {"group_size": 64}}
    assert step.group_size == 128  # named, so that the default is not chosen anew without down_proj
    [note] = noted(held, "target")
    assert note.subject == "mlp.down_proj"
    assert note.why.startswith("group_size: 64, so that vllm (tp 8) loads it: groups of 128 do not divide the 192")


def test_the_default_group_size_of_the_others_stays(headers_of, tmp_path):
    model = headers_of(hidden=1024, inter=1344)  # 64 by default, because of down_proj alone
    held = planned(recipe(), model, tmp_path / "out", target="sglang", repair=True)
    grids = {grid.name for grid, *_ in matrices(held)[1].values()}
    assert grids == {"int4-g64-sym"}
    assert len(noted(held, "group_size")) == 1


def test_a_pattern_that_is_taken_is_extended_not_overridden(headers_of, tmp_path):
    patterns = {"mlp.down_proj": {"bits": 8}, "layers.0.mlp.*": {"bits": 4}}
    held = planned(recipe(set=patterns), headers_of(inter=1536), tmp_path / "out", target="vllm", tp=8, repair=True)
    found = matrices(held)[1]
    assert found["model.layers.0.mlp.down_proj"][0] == IntegerSpec(4, 64)
    assert found["model.layers.1.mlp.down_proj"][0] == IntegerSpec(8, 64)


def test_patterns_are_few_and_change_no_others(headers_of, tmp_path):
    made = recipe(set={"layers.1.block_sparse_moe.experts.2.w1": {"bits": 8}})
    held = planned(made, headers_of(family="mixtral"), tmp_path / "out", target="vllm", repair=True)
    [step] = held.recipe.steps
    block = "model.layers.1.block_sparse_moe.experts.*"
    assert list(step.set)[1:] == [f"{block}.w1", f"{block}.w3", f"{block}.w2"]
    assert step.group_size is None  # nothing that the default depends on was changed


def test_several_faults_are_repaired_one_after_the_other(headers_of, tmp_path):
    made = recipe("gptq", sym=False, actorder="group", group_size=256)
    held = planned(made, headers_of(inter=1536), tmp_path / "out", target="vllm", tp=8, repair=True)
    kinds = [(note.subject, note.why.partition(",")[0]) for note in noted(held, "target")]
    assert kinds == [
        ("all matrices", "sym: true"),
        ("all matrices", "group_size: 128"),
        ("mlp.down_proj", "group_size: 64"),
        ("all matrices", "actorder: static"),
    ]


def test_linears_without_a_known_split_are_refused_when_split():
    entries = [
        Entry(TensorSpec("model.layers.0.mixer.in_proj.weight", "BF16", (128, 128)), W4, block=True, linear=True)
    ]
    for target in (TARGETS["vllm"], TARGETS["sglang"]):
        assert violations(target, "compressed-tensors", entries, {}) == []
        [item] = violations(target, "compressed-tensors", entries, {}, Machine(2))
        assert "not known how a linear of this name is split" in item.what
        assert item.by_hand == "use --tp 1"


def test_a_router_is_never_split():
    router = Entry(TensorSpec("model.layers.0.mlp.gate.weight", "BF16", (3, 128)), None, block=True, linear=True)
    expert = Entry(
        TensorSpec("model.layers.0.mlp.experts.0.w2.weight", "BF16", (128, 256)), W4, block=True, linear=True
    )
    assert violations(TARGETS["vllm"], "compressed-tensors", [router, expert], {}, Machine(2)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "vlm"}, "did you mean 'vllm'?"),
        ({"tp": 2}, "--tp 2 says nothing without --target"),
        ({"tp": 2, "target": "transformers"}, "--tp 2 is not for transformers"),
        ({"tp": 10**9, "target": "vllm"}, "cannot be shared out to 1000000000 devices"),
        ({"tp": 0, "target": "vllm"}, "--tp 0 is no number of devices"),
        ({"repair": True}, "--repair without --target"),
        ({"gpu": "sm_90"}, "--gpu says nothing without --target"),
        ({"gpu": "sm_90", "target": "gptqmodel"}, "--gpu is not for gptqmodel, which has no facts about GPUs"),
        ({"gpu": "h100", "target": "vllm"}, "--gpu h100 is no architecture of a GPU"),
    ],
)
def test_targets_that_say_nothing_are_refused(headers_of, tmp_path, options, words):
    with pytest.raises((PlanError, RecipeError)) as refused:
        planned(recipe(), headers_of(), tmp_path / "out", **options)
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


def test_every_fact_is_broken_by_some_case(headers_of, tmp_path):
    """No runtime can have a fact that no case above exercises."""
    reached = set()
    for case in REFUSED:
        plan, target = planned(recipe(**case.recipe), headers_of(**case.model), tmp_path / "out"), TARGETS[case.target]
        found = violations(
            target, plan.format.name, plan.entries, plan.headers.config, Machine.named(case.tp, case.gpu)
        )
        for fact in target.formats.get(plan.format.name, ()):
            if any(item.what.startswith((fact.why, fact.why.partition(" q, k, v")[0])) for item in found):
                reached.add((case.target, fact.why))
    known = {
        (name, fact.why)
        for name, target in TARGETS.items()
        for facts in target.formats.values()
        for fact in facts
        if not isinstance(fact, (Devices, LostTypes)) and not (isinstance(fact, OnGpus) and fact.runs)
    }
    by_entries = {  # below, and in test_head_matrix.py
        ("sglang", "it was not seen to read codes of a head"),
        ("transformers", "it leaves a quantised head at random values, without an error"),
        (
            "transformers",
            "it splits the experts of Llama 4 before it loads a quantised model, and finds no tensors for the parts",
        ),
    }
    unreachable = {  # the formats themselves refuse other widths, so these only show in `list targets`
        ("transformers", "GPTQModel's kernels take 2, 3, 4 and 8 bits"),
        ("gptqmodel", "it takes 2, 3, 4 and 8 bits"),
        *((name, "awq has 4 bits") for name, target in TARGETS.items() if "awq" in target.formats),
    }
    assert known - reached == by_entries | unreachable


# --- whatever the request ---


@settings(max_examples=40, deadline=None)
@given(
    target=st.sampled_from(sorted(TARGETS)),
    tp=st.sampled_from([1, 2, 4]),
    inter=st.integers(1, 40).map(lambda n: 32 * n),
    format_=st.sampled_from(["gptq", "awq", "compressed-tensors", "dense"]),
    bits=st.sampled_from([2, 4, 8]),
    group=st.sampled_from([None, PER_ROW, 16, 32, 128]),
    sym=st.booleans(),
    leaf=st.sampled_from(["q_proj", "mlp.*", "layers.0.*", "o_proj", "layers.1.mlp.up_proj"]),
    change=st.sampled_from([{"bits": 8}, {"group_size": 32}, {"skip": True}, {"group_size": -1}, {"clip": "minmax"}]),
)
def test_a_repair_ends_in_a_plan_that_its_recipe_repeats_or_in_a_refusal(
    target, tp, inter, format_, bits, group, sym, leaf, change
):
    tp = tp if TARGETS[target].tensor_parallel else 1
    made = recipe(format_, "rtn", bits=bits, group_size=group, sym=sym, set={leaf: change})
    with tempfile.TemporaryDirectory() as folder:
        model = headers_only(Path(folder) / "model", hidden=256, inter=inter, heads=4, kv=2, head=64)
        out = Path(folder) / "out"
        try:
            held = planned(made, model, out, target=target, tp=tp, repair=True)
        except PlanError:
            return
        assert violations(TARGETS[target], held.format.name, held.entries, held.headers.config, Machine(tp)) == []
        assert matrices(planned(parse(held.recipe.as_data()), model, out)) == matrices(held)


# --- the command line ---


def test_a_target_on_the_command_line(headers_of, tmp_path):
    model, out = headers_of(inter=1536), tmp_path / "out"
    refused = call("plan", "rtn", model, "-o", out, "--target", "vllm", "--tp", "8")
    assert refused.returncode == 2
    [error, hint] = refused.stderr.splitlines()
    assert error.startswith("error: vLLM does not load model.layers.0.mlp.down_proj and 1 more on 8 devices: groups of")
    assert "pass --repair to use groups of 64" in hint

    done = call("plan", "rtn", model, "-o", out, "--target", "vllm", "--tp", "8", "--repair", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["targets"]["vllm"] == "ok"
    assert set(plan["targets"]) == set(TARGETS)
    assert "down_proj" in plan["targets"]["llama.cpp"][0]
    assert [entry["subject"] for entry in plan["ledger"] if entry["kind"] == "target"] == ["mlp.down_proj"]
    printed = call("rtn", model, "-o", out, "--target", "vllm", "--tp", "8", "--repair", "--print-recipe")
    assert parse(yaml.safe_load(printed.stdout)).as_data() == plan["recipe"]
    people = call("plan", "rtn", model, "-o", out, "--target", "vllm", "--tp", "2")
    assert any(line.split() == ["loads", "in", "vllm", "(tp", "2)"] for line in people.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_a_repaired_run_carries_the_recipe_that_repeats_it(tiny_model_dir, tmp_path):
    whole = call("rtn", tiny_model_dir, "-o", tmp_path / "a", "--target", "sglang", "--tp", "4", "--repair", "--json")
    assert whole.returncode == 0, whole.stderr
    report = json.loads(whole.stdout)
    assert {e["subject"] for e in report["ledger"] if e["kind"] == "target"} == {"self_attn.o_proj"}
    again = call("run", tmp_path / "a" / "llmcompress.yaml", tiny_model_dir, "-o", tmp_path / "b", "--json")
    assert json.loads(again.stdout)["tensors"] == report["tensors"]
    assert (tmp_path / "a" / "llmcompress.yaml").read_text() == (tmp_path / "b" / "llmcompress.yaml").read_text()


def test_list_targets_shows_the_table():
    rows = json.loads(call("list", "targets", "--json").stdout)
    assert {row["target"] for row in rows} == set(TARGETS)
    [row] = [row for row in rows if (row["target"], row["format"]) == ("vllm", "gptq")]
    assert (row["as of"], row["bits"], row["asymmetric"]) == ("0.33, read; 0.32 run on a CPU", "4, 8", "none")
    assert row["groups"] == "32, 64, 128, per row"
    assert "it refuses groups in activation order (desc_act)" in row["facts"]
