"""What a format refuses, and the config files that make engines read it."""

import re

import pytest

from entries import AWQ, DENSE, GPTQ, PACKED, W4, matrix, model
from llmcompress import __version__
from llmcompress.grids.base import PER_ROW
from llmcompress.grids.integer import IntegerSpec


def settings_of(format_, entries, config=None):
    return format_.config(entries, config or {})["config.json"]["quantization_config"]


def test_uniform_gptq_needs_no_rules():
    files = GPTQ.config(model(), {})
    settings = files["config.json"]["quantization_config"]
    assert settings == files["quantize_config.json"]
    assert settings == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "static_groups": False,
        "damp_percent": 0.01,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"llmcompress:{__version__}"]},
    }


def test_gptq_says_what_it_skips_to_every_engine():
    entries = model({r"layers\.1\.mlp\.down_proj": None, r"layers\.0\.self_attn\.[qkv]_proj": None})
    settings = settings_of(GPTQ, entries)
    skipped = [rule for rule in settings["dynamic"] if rule.startswith("-:")]
    assert len(skipped) == 5
    assert all(settings["dynamic"][rule] == {} for rule in skipped)

    def rules(name):
        return [rule for rule in skipped if re.match(rule[2:], name)]

    assert rules("model.layers.1.mlp.down_proj")
    assert not rules("model.layers.11.mlp.down_proj")
    assert not rules("model.layers.1.mlp.down_proj_extra")
    assert rules("model.layers.0.self_attn.qkv_proj")  # vLLM's and SGLang's name for q, k and v
    assert not rules("model.layers.1.self_attn.qkv_proj")
    [listed] = settings["modules_in_block_to_quantize"]
    assert len(listed) == 10
    assert not {"lm_head", "model.layers.1.mlp.down_proj"} & set(listed)


def test_a_head_is_named_as_vllm_looks_for_it():
    [group] = settings_of(PACKED, model(head=True))["config_groups"].values()
    assert group["targets"] == ["Linear", "lm_head"]  # which it does not take for a Linear
    [listed] = settings_of(GPTQ, model({"down_proj": None}, head=True))["modules_in_block_to_quantize"]
    assert "lm_head" in listed


def test_gptq_says_which_modules_have_settings_of_their_own():
    entries = model(
        {r"mlp\.down_proj": IntegerSpec(8, PER_ROW), r"mlp\.(gate|up)": IntegerSpec(8, 64), "layers.0.*o_proj": None}
    )
    settings = settings_of(GPTQ, entries)
    assert (settings["bits"], settings["group_size"]) == (4, 32)
    rules = settings["dynamic"]
    assert rules[r"+:^model\.layers\.1\.mlp\.down_proj$"] == {"bits": 8, "group_size": -1}
    assert rules[r"+:^model\.layers\.0\.mlp\.gate_up_proj$"] == {"bits": 8, "group_size": 64}
    kinds = [rule[0] for rule in rules]
    assert kinds == sorted(kinds, reverse=True)  # skips first, as GPTQModel keeps them
    assert not any("q_proj" in rule for rule in rules)


def test_gptq_options_come_from_the_method():
    entries = model(options={"damp_percent": 0.05, "static_groups": True, "act_order": True, "true_sequential": True})
    settings = settings_of(GPTQ, entries)
    assert (settings["damp_percent"], settings["static_groups"], settings["true_sequential"]) == (0.05, True, True)
    assert settings["desc_act"] is False  # static groups leave the natural order on disk
    assert "damp_percent" not in settings_of(GPTQ, model(options={}))
    assert "damp_percent" not in settings_of(GPTQ, model(options={"damp_percent": 0.0}))  # transformers would refuse it
    assert settings_of(GPTQ, model(permuted=True))["desc_act"] is True


def test_asymmetric_gptq_is_written_in_the_convention_without_carry():
    settings = settings_of(GPTQ, model({"": IntegerSpec(4, 32, symmetric=False)}))
    assert settings["sym"] is False
    assert settings["checkpoint_format"] == settings["format"] == "gptq_v2"


def test_a_quantised_head_is_announced():
    assert settings_of(GPTQ, model(head=True))["lm_head"] is True
    assert settings_of(PACKED, model(head=True))["ignore"] == []


def test_gptq_says_of_experts_what_holds_for_all_of_a_layer():
    """vLLM and SGLang look for rules under the name of the experts' list."""
    name = "model.layers.{}.block_sparse_moe.experts.{}.{}"
    grids = {0: None, 1: IntegerSpec(8, 32), 2: W4}
    entries = [matrix(name.format(n, e, leaf), grids[n]) for n in grids for e in (0, 1) for leaf in ("w1", "w2", "w3")]
    rules = settings_of(GPTQ, [*entries, matrix("m"), matrix("n")])["dynamic"]
    assert rules[r"-:^model\.layers\.0\.block_sparse_moe\.experts$"] == {}
    assert rules[r"+:^model\.layers\.1\.block_sparse_moe\.experts$"] == {"bits": 8, "group_size": 32}
    assert not any("layers\\.2" in rule for rule in rules)


def test_uniform_awq_leaves_out_the_head():
    assert AWQ.config(model({"": IntegerSpec(4, 32, symmetric=False)}), {}) == {
        "config.json": {
            "quantization_config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 32,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": ["lm_head"],
            }
        }
    }
    tied = [entry for entry in model() if entry.module != "lm_head"]
    assert settings_of(AWQ, tied)["modules_to_not_convert"] == ["lm_head"]


def test_awq_says_what_it_skips_to_every_engine():
    entries = model({r"layers\.1\.mlp\.down_proj": None, r"layers\.0\.self_attn\.[qkv]_proj": None})
    settings = settings_of(AWQ, entries)
    skipped = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"]
    skipped += ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.qkv_proj"]  # the last is SGLang's name
    assert settings["modules_to_not_convert"] == [*skipped, "lm_head"]
    assert settings["dynamic"] == {f"-:^{re.escape(name)}$": {} for name in skipped}
    part = settings_of(AWQ, model({r"layers\.0\.self_attn\.q_proj": None}))
    assert part["modules_to_not_convert"] == ["model.layers.0.self_attn.q_proj", "lm_head"]


def test_awq_leaves_out_routers_and_projections_outside_of_layers():
    router = matrix("model.layers.0.mlp.gate", None)
    outside = [matrix(name, None, block=False, linear=False) for name in ("project_in", "model.embed_tokens")]
    settings = settings_of(AWQ, [matrix("model.layers.0.mlp.experts.0.up_proj"), router, *outside])
    assert settings["modules_to_not_convert"] == ["model.layers.0.mlp.gate", "project_in", "lm_head"]
    assert list(settings["dynamic"]) == [r"-:^model\.layers\.0\.mlp\.gate$"]


def test_uniform_compressed_tensors_target_the_class():
    settings = settings_of(PACKED, model({r"layers\.0\.mlp\.down_proj": None}))
    assert list(settings["config_groups"]) == ["group_0"]
    group = settings["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["format"] == settings["format"] == "pack-quantized"
    assert group["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "actorder": None,
    }
    assert settings["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    assert settings["quantization_status"] == "compressed"


@pytest.mark.parametrize(("model_type", "heads"), [("llama", ["lm_head"]), ("gpt_neox", ["embed_out", "lm_head"])])
def test_a_head_that_is_tied_and_has_no_tensor_is_ignored_by_name(model_type, heads):
    entries = [entry for entry in model() if entry.module != "lm_head"]
    assert settings_of(PACKED, entries, {"model_type": model_type})["ignore"] == heads


def test_projections_outside_of_layers_are_ignored_and_embeddings_are_no_linears():
    outside = [
        "model.decoder.project_in",
        "model.decoder.embed_positions",
        "transformer.wte",
        "model.decoder.project_out",
    ]
    entries = [matrix("m"), *(matrix(name, None, linear=False, block=False) for name in outside)]
    assert settings_of(PACKED, entries)["ignore"] == [outside[0], outside[3], "lm_head"]
    assert "dynamic" not in settings_of(GPTQ, entries)  # gptq is about decoder layers anyway


def test_a_head_of_another_name_is_ignored_under_both():
    entries = [matrix("m"), matrix("embed_out", None, linear=False, block=False)]
    assert settings_of(PACKED, entries, {"model_type": "gpt_neox"})["ignore"] == ["embed_out", "lm_head"]


def test_mixed_compressed_tensors_target_exact_names():
    entries = model({r"mlp\.down_proj": IntegerSpec(8, PER_ROW, symmetric=False)}, options={"act_order": True})
    groups = settings_of(PACKED, entries)["config_groups"]
    assert [len(group["targets"]) for group in groups.values()] == [12, 2]
    assert groups["group_1"]["targets"] == [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)]
    assert groups["group_0"]["weights"]["actorder"] == "weight"
    weights = groups["group_1"]["weights"]
    assert (weights["strategy"], weights["group_size"], weights["symmetric"]) == ("channel", None, False)
    assert weights["actorder"] is None  # the library knows an order only together with groups


@pytest.mark.parametrize("alike", [True, False])
def test_experts_of_one_scheme_are_named_by_a_pattern(alike):
    """transformers takes the group of experts to be the one with a pattern that says so, or else the first."""
    layer, w8 = "model.layers.0", IntegerSpec(8, 32)
    experts = [matrix(f"{layer}.mlp.experts.{n}.up_proj", W4 if alike or n else w8) for n in range(3)]
    shared = matrix(f"{layer}.mlp.shared_expert.up_proj", W4)
    groups = settings_of(PACKED, [matrix(f"{layer}.self_attn.o_proj", w8), *experts, shared])["config_groups"]
    named = ["re:.*\\.experts\\.\\d+\\..*"] if alike else [entry.module for entry in experts[1:]]
    assert groups["group_1"]["targets"] == [*named, shared.module]
    assert groups["group_0"]["targets"] == [f"{layer}.self_attn.o_proj", *(() if alike else (experts[0].module,))]
    assert all(re.match(named[0].removeprefix("re:"), entry.module) for entry in experts if alike)
    assert not (alike and re.match(named[0].removeprefix("re:"), shared.module))


def test_dense_changes_no_config():
    assert DENSE.config(model(), {}) == {"config.json": {}}
    assert DENSE.refuses(model({"": IntegerSpec(5, 32, symmetric=False)}, permuted=True), {}) is None


@pytest.mark.parametrize(
    ("format_", "entries", "config", "message"),
    [
        (GPTQ, [matrix("m", IntegerSpec(5, 32))], {}, "cannot hold int5-g32-sym"),
        (GPTQ, [matrix("m", IntegerSpec(3, 32), (48, 128))], {}, "multiples of 32"),
        (
            GPTQ,
            [matrix("m"), matrix("n", IntegerSpec(4, 32, symmetric=False))],
            {},
            "symmetric or asymmetric as a whole",
        ),
        (GPTQ, [matrix("project_in", block=False)], {}, "outside of decoder layers"),
        (AWQ, [matrix("m", IntegerSpec(8, 32))], {}, "cannot hold int8-g32-sym"),
        (
            AWQ,
            [matrix("m"), matrix("n", IntegerSpec(4, 64))],
            {},
            "one grid, not both int4-g32-sym and int4-g64-sym (n)",
        ),
        (AWQ, [matrix("m"), matrix("n", IntegerSpec(4, 32, symmetric=False))], {}, "one grid, not both"),
        (AWQ, [matrix("m", permuted=True)], {}, "activation order"),
        (AWQ, [matrix("m", transposed=True)], {}, "Conv1D"),
        (AWQ, [matrix("lm_head", block=False)], {}, "outside of decoder layers"),
        (AWQ, [matrix("m", W4, (48, 128))], {}, "multiple of 32 outputs, and m has 48"),
        *((AWQ, [matrix("m")], {"model_type": name}, "scales of activations") for name in ("gpt_neox", "falcon")),
        (PACKED, [matrix("m", permuted=True)], {}, "activation order"),
        (PACKED, [matrix("m", transposed=True)], {}, "Conv1D"),
        (DENSE, [matrix("m", dtype="F8_E4M3")], {}, "cannot hold decoded weights"),
        *(
            (format_, entries, config, message)
            for format_ in (GPTQ, AWQ, PACKED)
            for entries, config, message in (
                ([matrix("m", IntegerSpec(4, 48))], {}, "group size 48 does not divide the 128 inputs of m"),
                ([matrix("lm_head", block=False)], {"tie_word_embeddings": True}, "tied to the embedding"),
                ([matrix("model.embed_tokens", linear=False)], {}, "linear layers only"),
                ([matrix("m", None)], {}, "no module is to be quantised"),
            )
        ),
    ],
)
def test_what_a_format_cannot_hold_is_refused_with_a_way_out(format_, entries, config, message):
    what, way_out = format_.refuses(entries, config)
    assert message in what
    assert way_out
    assert not what[0].isupper()
