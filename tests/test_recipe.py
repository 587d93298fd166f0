"""Recipes are strict: what is not understood is refused by name, and what is written is read back the same."""

import os
from contextlib import suppress
from pathlib import Path
from typing import get_args

import annotated_types
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import llmcompress.calib
from llmcompress.engine.plan.matrix_options import matches, resolve_matrix_options, resolve_pruner_options
from llmcompress.errors import LlmcompressError, PlanError, RecipeError
from llmcompress.grids.grid_type import grid_types
from llmcompress.ledger import Ledger
from llmcompress.recipe import (
    Calibration,
    Expected,
    KvCache,
    Output,
    load,
    methods,
    parse,
    pruners,
    transforms,
)
from llmcompress.registry import discover

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def test_a_recipe_survives_yaml():
    made = parse({"steps": [{"method": "gptq", "bits": 3, "set": {"mlp.*": {"bits": 8}}}]})
    assert parse(yaml.safe_load(made.as_yaml())) == made


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_recipe_is_valid(file):
    assert load(file).steps


def test_there_are_shipped_recipes():
    assert CONFIGS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": [{"method": "gptqq"}]}, "did you mean 'gptq'"),
        ({"steps": [{"method": "gptq", "grp_size": 64}]}, "did you mean 'group_size'"),
        ({"steps": [{"method": "gptq", "bits": 7}]}, "bits = 7"),
        ({"steps": [{"method": "gptq", "percdamp": 2}]}, "percdamp = 2"),
        ({"steps": []}, "has no steps"),
        ({"steps": [3]}, "a step needs a method"),
        ({"step": []}, "did you mean 'steps'"),
        ({"steps": [{"method": "rtn"}], "calibration": {"sample": 3}}, "did you mean 'samples'"),
        ({"steps": [{"method": "rtn"}], "calibration": {"samples": 0}}, "samples = 0"),
        ({"steps": [{"method": "rtn"}], "output": 3}, "is not a mapping"),
        ({"steps": [{"method": "rtn"}], "output": 0}, "is not a mapping"),
        ({"steps": [{"method": "rtn"}], "calibration": {"samples": 10**400}}, "samples = 1000"),
        ({"steps": [{"method": "rtn"}], "calibration": {"seed": 1 << 64}}, "seed = "),
        ({"steps": [{"method": "rtn"}], "calibration": {"options": {"field": float("inf")}}}, "options.field = inf"),
        ({"steps": [{"method": "rtn", "set": {"x": {"bits": [8], "skip": True}}}]}, "set.x.bits = [8]"),
        ({"steps": [{"method": "rtn", "bits": "x" * 10_000}]}, "xxx..."),
        ("nonsense", "not a mapping"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(data, message):
    with pytest.raises(RecipeError) as refused:
        parse(data)
    assert message in str(refused.value)


def test_files_that_are_not_recipes_are_refused_in_one_line(tmp_path):
    for content in (
        b"steps: [", b"\xff\xfe", b"a: &a [*a]", b"!!python/object/apply:os.system [ls]", b"steps: [*nobody]",
        b"a: !!int ''", b"a: !!float ''", b"a: !!bool x", b"a: !!timestamp x", b"a: 2001-99-99", b"? {a: b}\n: c",
    ):  # fmt: skip
        file = tmp_path / "recipe.yaml"
        file.write_bytes(content)
        with pytest.raises(LlmcompressError) as refused:
            load(file)
        assert "\n" not in refused.value.message
    with pytest.raises(RecipeError, match="cannot be read"):
        load(tmp_path / "missing.yaml")


def test_anchors_and_merges_of_modest_size_are_understood(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "steps:\n- method: gptq\n  set:\n    a: &eight {bits: 8}\n    b: {<<: *eight, group_size: 64}\n    c: *eight\n"
    )
    (step,) = load(tmp_path / "recipe.yaml").steps
    assert step.set == {"a": {"bits": 8}, "b": {"bits": 8, "group_size": 64}, "c": {"bits": 8}}


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match="is not a file"):
        load(tmp_path / "recipe.yaml")


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["steps", "method", "gptq", "bits", "set", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(json)
def test_no_data_brings_anything_but_a_recipe_or_a_refusal(data):
    with suppress(LlmcompressError):
        assert parse(data).steps


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("mlp.down_proj", "model.layers.3.mlp.down_proj", True),
        ("down_proj", "model.layers.3.mlp.down_proj", True),
        ("proj", "model.layers.3.mlp.down_proj", False),
        ("layers.1.*", "model.layers.1.mlp.down_proj", True),
        ("layers.1.*", "model.layers.11.mlp.down_proj", False),
        ("*.q_proj", "model.layers.0.self_attn.q_proj", True),
    ],
)
def test_patterns_match_names_at_dots(pattern, module, expected):
    assert matches(pattern, module) is expected


@pytest.mark.parametrize(("widths", "expected"), [([256, 512], 128), ([576, 1536], 64), ([96, 64], 32), ([40], -1)])
def test_the_default_group_size_divides_every_width(widths, expected):
    ledger = Ledger()
    modules = {f"layers.0.m{i}": width for i, width in enumerate(widths)}
    resolved = resolve_matrix_options(methods()["rtn"](), modules, ledger)
    assert {method.group_size for method in resolved.values()} == {expected}
    assert bool(ledger.entries) == (expected != 128)


def test_a_pattern_of_another_type_begins_with_the_width_and_groups_of_that_type():
    kinds = {"a": {"type": "nvfp4"}, "b*": {"type": "fp8"}, "b.c": {"type": "int", "bits": 8}, "d": {"type": "mxfp8"}}
    step = methods()["rtn"](bits=3, group_size=64, sym=False, clip="minmax", set=kinds)
    found = resolve_matrix_options(step, dict.fromkeys(("a", "b", "b.c", "d", "e"), 256), Ledger())
    grids = {module: method.grid.name for module, method in found.items()}
    assert grids == {"a": "nvfp4", "b": "fp8-row", "b.c": "int8-g64-asym", "d": "mxfp8", "e": "int3-g64-asym"}
    assert {method.clip for method in found.values()} == {"minmax"}
    pruner = pruners()["magnitude"](sparsity=0.5, set={"a": {"type": "fp8"}})
    with pytest.raises(RecipeError, match="unknown option 'type' in set of step magnitude"):
        resolve_pruner_options(pruner, {"a": 256})


def test_a_named_group_size_that_does_not_fit_is_refused_with_ones_that_do():
    with pytest.raises(PlanError) as refused:
        resolve_matrix_options(methods()["rtn"](group_size=128), {"layers.0.q_proj": 576}, Ledger())
    assert "128 does not divide the 576 inputs of layers.0.q_proj" in refused.value.message
    assert "192" in refused.value.hint
    assert "64" in refused.value.hint


# -- bounds ---------------------------------------------------------------------------------------------------------


def options_of_recipes():
    """Every numeric field that a recipe may hold: (owner, name, field)."""
    grids = {f"grid {grid.name}": grid.options for grid in grid_types().values() if grid.options}
    parts = {kind.__name__: kind for kind in (Calibration, Output, KvCache, Expected)}
    owners = {**methods(), **pruners(), **transforms(), **discover(llmcompress.calib, "SOURCE"), **grids, **parts}
    for owner, model in owners.items():
        for name, field in model.model_fields.items():
            if {field.annotation, *get_args(field.annotation)} & {int, float}:
                yield owner, name, field


@pytest.mark.parametrize(("owner", "name", "field"), list(options_of_recipes()), ids=lambda item: str(item)[:30])
def test_every_number_of_a_recipe_is_bounded_on_both_sides(owner, name, field):
    held = {type(bound) for bound in field.metadata}
    assert held & {annotated_types.Ge, annotated_types.Gt}, f"{owner}: {name} has no lower bound"
    assert held & {annotated_types.Le, annotated_types.Lt}, f"{owner}: {name} has no upper bound"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps: [{method: rtn}]\nsteps: [{method: gptq}]\n", 2),
        ("calibration: {samples: 4, length: 8, samples: 5}\nsteps: [{method: rtn}]\n", 1),
        ("steps:\n- method: rtn\n  bits: 4\n  bits: 3\n", 4),
        ("steps:\n- method: rtn\n  set:\n    mlp.*: {bits: 8}\n    mlp.*: {bits: 2}\n", 5),
        ("steps:\n- {method: rtn, 'bits': 4, bits: 3}\n", 2),
        ("a: &a {x: 1}\nsteps:\n- {method: rtn}\na: *a\n", 4),
        ("? steps\n: [{method: rtn}]\n? steps\n: []\n", 3),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(text, line, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=rf"stands twice.*line {line}\b"):
        load(tmp_path / "recipe.yaml")
