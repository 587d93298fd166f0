"""Record what llama.cpp's converter makes of a tiny model of every family: keys, names, shapes, and hashes of values.

    scripts/interop/build_llama_cpp.sh DIR
    python scripts/interop/gguf_converter.py DIR/source tests/golden

The values of the models follow a formula, so that a test can make them again. The tokenizer is left out. Two files are
written: gguf_converter.json has several configs of the first families, gguf_families.json one of each other family.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import ggufmodels

COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96,
          "max_position_embeddings": 128, "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2}  # fmt: skip
GROUPED = COMMON | {"num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LONGROPE = {"long_factor": [1 + i / 2 for i in range(8)], "short_factor": [1 + i / 16 for i in range(8)]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
GEMMA = GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
# name: model type, config for transformers, keys of config.json to set (or, if null, to remove) after saving
MODELS = {
    "llama": ("llama", GROUPED, {}),
    "llama tied, with biases": (
        "llama", GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24}, {},
    ),
    "llama 3": ("llama", GROUPED | {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}, {}),
    "llama 3, old config": (
        "llama", GROUPED, {"rope_parameters": None, "head_dim": None, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    ),
    "llama linear, old config": (
        "llama", GROUPED,
        {"rope_parameters": None, "rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "mistral": ("mistral", GROUPED, {}),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "qwen2": ("qwen2", GROUPED, {}),
    "qwen2 yarn": ("qwen2", GROUPED | {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1e6}}, {}),
    "qwen2 yarn, old config": (
        "qwen2", GROUPED, {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {**YARN, "rope_type": "yarn"}},
    ),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 16}, {}),
    "qwen3_moe": (
        "qwen3_moe",
        GROUPED | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                   "norm_topk_prob": True},
        {},
    ),
    "gemma2": ("gemma2", GEMMA, {}),
    "gemma3": ("gemma3_text", GEMMA, {}),
    "gemma3, old config": (
        "gemma3_text", GEMMA,
        {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3": ("phi3", GROUPED | {"original_max_position_embeddings": 64}, {}),
    "phi3 long": (
        "phi3",
        GROUPED | {"original_max_position_embeddings": 64, "sliding_window": 32,
                   "rope_parameters": {**LONGROPE, "rope_type": "longrope", "rope_theta": 10000.0,
                                       "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0}},
        {},
    ),
    "phi3 long, old config": (
        "phi3", GROUPED | {"original_max_position_embeddings": 64},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {**LONGROPE, "type": "longrope"}},
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 96,
                      "bos_token_id": 1, "eos_token_id": 2}, {"n_ctx": 128}),
    "gpt_neox": ("gpt_neox", COMMON, {"rotary_pct": 0.25}),
    "olmo2": ("olmo2", GROUPED, {}),
}  # fmt: skip
OTHER_NAMES = {  # of classes, which transformers 5 calls otherwise
    "MptForCausalLM": "MPTForCausalLM",
    "MiniMaxForCausalLM": "MiniMaxText01ForCausalLM",
    "MiniMaxM3VLForCausalLM": "MiniMaxM3SparseForCausalLM",
}
AS_PUBLISHED = (
    "minimax_m3_vl_text",
    "qwen4_exp_text",
)  # whose configs transformers changes as the converter reads them
READERS = {}  # of config.json: the converter's, and one that takes it as it is
VOCABULARY = 90  # tokens of Gemma 3's tokenizer, fewer than rows of its embedding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="LLAMA.CPP", type=Path)
    parser.add_argument("output", metavar="GOLDEN", type=Path, help="directory of the two files")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.source), str(arguments.source / "gguf-py")]
    tokenizers = ModuleType("sentencepiece")  # is asked for where a tokenizer is read
    tokenizers.SentencePieceProcessor = object
    sys.modules.setdefault("sentencepiece", tokenizers)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "Tiny-Model-7B-v2.0"
        write(arguments.output / "gguf_converter.json", {name: answer(place, *model) for name, model in MODELS.items()})
        others = {
            kind: answer(place, kind, ggufmodels.small_config(kind), ggufmodels.PUBLISHED.get(kind, {}))
            for kind in ggufmodels.MODELS
        }
        write(arguments.output / "gguf_families.json", others)


def write(file: Path, found: dict) -> None:
    lines = ",\n".join(f"{json.dumps(name)}: {one_per_line(model)}" for name, model in found.items())
    file.write_text("{\n" + lines + "\n}\n")


def answer(folder: Path, model_type: str, config: dict, changes: dict) -> dict:
    save(folder, model_type, config, changes)
    stored = load_file(folder / "model.safetensors")
    keys, tensors = converted(folder)
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "source": {name: list(value.shape) for name, value in sorted(stored.items())},
        "keys": keys,
        "tensors": tensors,
    }


def save(folder: Path, model_type: str, config: dict, changes: dict) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float32)
    model.save_pretrained(folder)
    file, settings = folder / "model.safetensors", folder / "config.json"
    shapes = {
        part: extents
        for name, value in load_file(file).items()
        for part, extents in ggufmodels.published(model_type, name, value.shape).items()
    }
    save_file({name: ggufmodels.made_values(name, torch.Size(extents)) for name, extents in shapes.items()}, file)
    changed = json.loads(settings.read_text()) | changes
    settings.write_text(json.dumps({key: value for key, value in changed.items() if changes.get(key, 0) is not None}))
    tokens = {
        str(number): number for number in range(VOCABULARY if model_type == "gemma3_text" else changed["vocab_size"])
    }
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))


def converted(folder: Path) -> tuple[dict, dict]:
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase

    hyperparameters = json.loads((folder / "config.json").read_text())
    READERS.setdefault(False, ModelBase.load_hparams)
    READERS[True] = lambda *_: dict(hyperparameters)
    ModelBase.load_hparams = staticmethod(READERS[hyperparameters["model_type"] in AS_PUBLISHED])
    name = hyperparameters["architectures"][0]
    model_class = get_model_class(OTHER_NAMES.get(name, name))
    model_class.set_vocab = lambda self: None
    model_class._get_suppress_tokens = lambda self: None  # which reads the tokenizer
    model_class.no_mtp = True
    model = model_class(folder, gguf.LlamaFileType.ALL_F32, folder / "converted.gguf")
    type(getattr(model, "impl", model)).set_vocab = lambda self: None
    if hyperparameters["model_type"] == "gpt_neox":
        model.hparams.setdefault("rotary_pct", 0.25)  # which transformers 5 takes away
    model.write()
    reader = gguf.GGUFReader(folder / "converted.gguf")
    keys = {
        name: [field.contents(), "/".join(kind.name for kind in field.types)]
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {
        tensor.name: [tensor.shape.tolist()[::-1], ggufmodels.digest(tensor.name, tensor.data)]
        for tensor in reader.tensors
    }
    return keys, tensors


def one_per_line(model: dict) -> str:
    return "{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in model.items()) + "}"


if __name__ == "__main__":
    main()
