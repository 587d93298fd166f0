"""Checkpoints as mlx-lm writes them, whose experts lie in one tensor: read as those that have them one by one."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.engine.source.open import checkpoint_headers, open_checkpoint
from llmcompress.errors import CheckpointError
from llmcompress.recipe import parse
from madetokenizers import byte_level, save
from tinyruns import compress

LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # as mlx-lm's class for Mixtral says
FAMILIES = {"mixtral": {}, "qwen3_moe": {"moe_intermediate_size": 64, "norm_topk_prob": True, "vocab_size": 288}}
FAMILIES["olmoe"] = {"num_experts": 4, "num_experts_per_tok": 2}  # no declaration


def stacked(path, out, **changes):
    """A copy in which the parts of all experts are stacked, as `sanitize` of mlx-lm does, and said of as it would."""
    shutil.copytree(path, out)
    tensors, stacks = load_file(out / "model.safetensors"), {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        if found := re.fullmatch(r"(.*)\.experts\.\d+\.(\w+)\.(\w+)", name):
            block, leaf, part = found.groups()
            stacks.setdefault(f"{block}.switch_mlp.{LEAVES.get(leaf, leaf)}.{part}", []).append(tensors.pop(name))
    tensors |= {name: torch.stack(parts) for name, parts in stacks.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | changes
    said = {}
    for name, value in config["quantization"].items():
        block, expert, leaf = name.partition(".experts.")
        leaf = leaf.partition(".")[2]
        said[f"{block}.switch_mlp.{LEAVES.get(leaf, leaf)}" if expert else name] = value
    config["quantization"] = said
    config["quantization_config"] = {key: value for key, value in said.items() if key != "quant_method"}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def apart(random_model_dir, tmp_path_factory):
    """apart(family): a model in MLX's codes with experts one by one, some of them with more bits."""
    root = tmp_path_factory.mktemp("apart")

    def of(family):
        if not (root / family).exists():
            wider = {"w2" if family == "mixtral" else "experts.*.down_proj": {"bits": 8}}
            step = {"method": "rtn", "type": "offset", "group_size": 32, "set": wider}
            source = random_model_dir(family, **FAMILIES[family])
            compress(source, root / family, parse({"steps": [step], "output": {"format": "mlx"}}))
        return root / family

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_stacks_of_experts_are_read_as_single_matrices(family, apart, tmp_path):
    single = open_checkpoint(checkpoint_headers(apart(family)))
    whole = open_checkpoint(checkpoint_headers(stacked(apart(family), tmp_path / "stacked")))
    assert set(whole.names()) == set(single.names())
    wide = set()
    for name in single.names():
        assert whole.headers.tensors[name].spec == single.headers.tensors[name].spec
        assert torch.equal(whole.read(name), single.read(name))
        module = name.removesuffix(".weight")
        if (coded := whole.coded(module)) is not None:
            assert whole.code_grid(module) == single.code_grid(module) == coded.grid.spec
            wide |= {module} if coded.grid.spec.bits == 8 else set()
    assert len(wide) == 2 * 4


def test_a_gguf_file_of_stacks_has_the_bytes_of_one_of_single_experts(apart, tmp_path, main):
    stacked(apart("qwen3_moe"), tmp_path / "stacked")
    for name, path in {"one.gguf": apart("qwen3_moe"), "other.gguf": tmp_path / "stacked"}.items():
        save(byte_level(), shutil.copytree(path, tmp_path / "model"))  # of one name, which stands in the file
        assert main("gguf", tmp_path / "model", "--type", "Q8_0", "-o", tmp_path / name, "-q") == 0
        shutil.rmtree(tmp_path / "model")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()


def test_stacks_of_families_that_mlx_lm_changes_in_other_ways_are_refused(apart, tmp_path):
    """Of Qwen3-Next it adds one to the norms, say, so that nothing else could be believed."""
    with pytest.raises(CheckpointError, match=r"switch_mlp\.\w+ holds experts as .* read of mixtral, olmoe"):
        checkpoint_headers(stacked(apart("qwen3_moe"), tmp_path / "stacked", model_type="qwen3_next"))


STACK, SINGLE = "model.layers.1.mlp.switch_mlp.up_proj", "model.layers.1.mlp.experts.2.up_proj"
DAMAGED = {
    "scales of fewer experts": lambda held: {f"{STACK}.scales": held[f"{STACK}.scales"][:3]},
    "codes of fewer experts": lambda held: {f"{STACK}.weight": held[f"{STACK}.weight"][:3]},
    "no experts": lambda held: {f"{STACK}.weight": held[f"{STACK}.weight"][:0]},
    "one number": lambda held: {f"{STACK}.weight": held[f"{STACK}.weight"].view(torch.int32)[0, 0, 0]},
    "an expert that is there twice": lambda held: {f"{SINGLE}.scales": held[f"{STACK}.scales"][2]},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_stacks_that_do_not_fit_are_refused_when_a_run_is_planned(kind, apart, tmp_path, main, capsys):
    path = stacked(apart("qwen3_moe"), tmp_path / "stacked")
    tensors = load_file(path / "model.safetensors")
    tensors |= {name: tensor.clone() for name, tensor in DAMAGED[kind](tensors).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert main("rtn", path, "--group-size", 32, "-o", tmp_path / "out", "--dry-run") == 2
    said = capsys.readouterr().err
    assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1
    assert "layers.1.mlp." in said
