"""Types of tensors are those that llama-quantize chooses: its own answers (scripts/interop/gguf_mixtures.py)."""

import json
from pathlib import Path

import gguf
import pytest

from llmcompress.errors import PlanError, RecipeError
from llmcompress.formats.gguf.mixture import Wishes, matches, mixture
from llmcompress.formats.gguf.rules import Facts
from llmcompress.formats.gguf.types import ALIASES, FILE_TYPES, file_type, tensor_type

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "gguf_mixtures.json").read_text())
COARSE = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
CASES = [(model, kind) for model, answer in GOLDEN.items() for kind in answer["types"]]
WISHES = [(model, number) for model, answer in GOLDEN.items() for number in range(len(answer["wishes"]))]


def tensors_of(model):
    """(name, shape) of every tensor, the last layer first: mixtures bring them into order themselves."""
    layers = GOLDEN[model]["facts"]["layers"]
    return [
        (role.format(layer), tuple(shape))
        for role, shape in GOLDEN[model]["tensors"].items()
        for layer in (reversed(range(layers)) if "{}" in role else [0])
    ]


def expected(model, answer):
    """Type of every tensor from the runs of an answer."""
    layers = GOLDEN[model]["facts"]["layers"]
    types = {}
    for role in GOLDEN[model]["tensors"]:
        said = "F32" if role in GOLDEN[model]["always_f32"] else answer.get(role, answer["*"])
        count = layers if "{}" in role else 1
        runs = [run.partition("*") for run in said.split()] if " " in said else [(said, "", str(count))]
        kinds = [kind for kind, _, times in runs for _ in range(int(times or 1))]
        assert len(kinds) == count
        types |= {role.format(layer): kind for layer, kind in enumerate(kinds)}
    return types


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_types_are_those_of_llama_quantize(model, kind):
    name, _, informed = kind.partition("+")
    wanted = expected(model, GOLDEN[model]["types"][kind])
    coarse = COARSE | ({"Q2_K"} if name == "Q2_K_S" else set())
    needy = any(found in coarse for tensor, found in wanted.items() if tensor.startswith("blk."))
    both = [bool(informed)]
    if f"{name}+imatrix" not in GOLDEN[model]["types"] and not informed:
        both = [True, *both]
    for importance in both:
        facts = Facts(**GOLDEN[model]["facts"], importance=importance)
        if needy and not importance:  # which a dry run does not ask for
            with pytest.raises(PlanError, match=f"{name} needs the importance of inputs"):
                mixture(tensors_of(model), facts, file_type(name))
            continue
        chosen = mixture(tensors_of(model), facts, file_type(name))
        assert {tensor: choice.type.name for tensor, choice in chosen.items()} == wanted


@pytest.mark.parametrize(("model", "number"), WISHES)
def test_wishes_have_the_effect_of_the_options_of_llama_quantize(model, number):
    case = GOLDEN[model]["wishes"][number]
    facts = Facts(**GOLDEN[model]["facts"])
    chosen = mixture(tensors_of(model), facts, file_type(case["file_type"]), Wishes(**case["wishes"]))
    assert {tensor: choice.type.name for tensor, choice in chosen.items()} == expected(model, case["types"])


def test_the_order_is_that_of_llama_quantize():
    chosen = mixture(tensors_of("llama"), Facts(**GOLDEN["llama"]["facts"]), file_type("Q4_K_M"))
    names = list(chosen)
    assert names[:4] == ["output.weight", "output_norm.weight", "token_embd.weight", "blk.0.attn_k.weight"]
    assert [name for name in names if "attn_v" in name] == [f"blk.{layer}.attn_v.weight" for layer in range(32)]


def test_a_narrow_matrix_says_which_type_it_would_have():
    chosen = mixture(tensors_of("llama-narrow-tied"), Facts(**GOLDEN["llama-narrow-tied"]["facts"]), file_type("Q4_K"))
    choice = chosen["blk.0.attn_q.weight"]
    assert (choice.type.name, choice.wanted.name) == ("Q5_0", "Q4_K")
    assert all(choice.type == choice.wanted for name, choice in chosen.items() if "ffn_down" in name)


def test_later_patterns_win():
    facts, tensors = Facts(**GOLDEN["llama"]["facts"]), tensors_of("llama")
    wishes = Wishes(tensors={"ffn_*": "Q8_0", "blk.1.*": "F16", "blk.1.ffn_up.weight": "Q5_1"})
    chosen = {name: choice.type.name for name, choice in mixture(tensors, facts, file_type("Q4_0"), wishes).items()}
    assert [chosen[f"blk.{layer}.ffn_up.weight"] for layer in (0, 1, 2)] == ["Q8_0", "Q5_1", "Q8_0"]
    assert [chosen[f"blk.{layer}.attn_q.weight"] for layer in (0, 1, 2)] == ["Q4_0", "F16", "Q4_0"]
    assert chosen["blk.1.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("attn_v", True),
        ("attn_v.weight", True),
        ("blk.3.attn_v", True),
        ("blk.[0-3].attn_?", True),
        ("*", True),
        ("3.attn_v.*", True),
        ("attn", False),
        ("blk.33.*", False),
        ("weight.*", False),
    ],
)
def test_patterns_fit_names_or_their_ends(pattern, fits):
    assert matches(pattern, "blk.3.attn_v.weight") is fits


@pytest.mark.parametrize("pattern", ["attn_z", "attn_norm", "blk.32.*"])
def test_a_pattern_that_fits_no_matrix_is_refused(pattern):
    with pytest.raises(PlanError, match="fits no matrix"):
        mixture(
            tensors_of("llama"), Facts(**GOLDEN["llama"]["facts"]), file_type("Q8_0"), Wishes(tensors={pattern: "F16"})
        )


def test_q2_k_s_asks_for_the_importance_of_inputs():
    with pytest.raises(PlanError, match="Q2_K_S needs"):
        mixture(tensors_of("llama"), Facts(**GOLDEN["llama"]["facts"]), file_type("Q2_K_S"))


def test_file_types_have_the_numbers_of_the_gguf_package():
    for name, kind in FILE_TYPES.items():
        known = gguf.LlamaFileType[{"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}.get(name, f"MOSTLY_{name}")]
        assert kind.id == known
        assert tensor_type(kind.default).id in set(gguf.GGMLQuantizationType)
    assert {alias: file_type(alias.lower()).name for alias in ALIASES} == ALIASES


@pytest.mark.parametrize(("name", "near"), [("Q4_K_L", "Q4_K_M"), ("q4km", "Q4_K_M"), ("IQ1_XXS", "IQ")])
def test_unknown_types_come_with_a_suggestion(name, near):
    with pytest.raises(RecipeError, match="unknown GGUF file type") as caught:
        file_type(name)
    assert near in str(caught.value.hint)
    with pytest.raises(RecipeError, match="unknown tensor type"):
        tensor_type("Q4_K_M")


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_K", "IQ4_XS", "MXFP4"])
def test_sizes_are_those_of_the_gguf_package(name):
    kind = tensor_type(name)
    rows = gguf.quant_shape_to_byte_shape((3, 5, 512), gguf.GGMLQuantizationType[name])
    assert kind.nbytes((3, 5, 512)) == 15 * rows[-1]


def test_a_broken_row_has_no_size():
    with pytest.raises(ValueError, match="blocks of 256"):
        tensor_type("Q4_K").nbytes((4, 576))
