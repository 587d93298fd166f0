"""Whether config.json has the keys engines need, and says of every linear what its tensors say."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmcompress.validate import awq
from llmcompress.validate.declared_schemes import scheme_of
from llmcompress.validate.directory import HEADS, Directory
from llmcompress.validate.float4 import FLOAT4_PARTS
from llmcompress.validate.float8_blocks import MXFP8
from llmcompress.validate.matrices import quantised_modules
from llmcompress.validate.matrix import FLOATS, INTEGERS, PACKED
from llmcompress.validate.mlx_codes import mlx_wrongs
from llmcompress.validate.stored import Tensor, read_json

_AUTO_ROUND_KEYS = (
    "bits",
    "group_size",
    "sym",
    "data_type",
    "packing_format",
    "block_name_to_quantize",
    "extra_config",
)
_GPTQ_KEYS = ("bits", "group_size", "sym", "desc_act", "lm_head", "checkpoint_format")
_PACKED_KEYS = ("format", "quantization_status", "config_groups", "ignore")
_BITSANDBYTES_KEYS = ("load_in_4bit", "load_in_8bit", "llm_int8_skip_modules")
_MODELOPT_KEYS = ("quant_algo", "config_groups", "ignore")
_FP8_KEYS = ("fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert")
_WEIGHT_KEYS = {
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "dynamic",
    "actorder",
    "observer",
    "scale_dtype",
    "block_structure",
}


def config_wrongs(directory: Directory) -> list[str]:
    """Keys that config.json lacks, and disagreements with tensors or report; DamageError for an unreadable file."""
    recorded = {name: record["grid"] for name, record in directory.records.items() if record["grid"]}
    if directory.form == "dense":
        absent = [name for name in recorded if f"{name}.weight" not in directory.tensors]
        return [f"report.json speaks of {name}, which has no weight" for name in absent]
    settings = directory.config["quantization_config"]
    looks = {
        "gptq": _gptq_wrongs,
        "awq": _awq_wrongs,
        "auto-round": _auto_round_wrongs,
        "compressed-tensors": _packed_wrongs,
        "bitsandbytes": _bitsandbytes_wrongs,
        "fp8": _fp8_wrongs,
        "modelopt": _modelopt_wrongs,
        "mlx": _mlx_wrongs,
    }
    wrong = looks.get(directory.form, _own_wrongs)(directory, settings)
    if wrong:
        return wrong  # what follows reads the keys that are missing
    coded = set(quantised_modules(directory.tensors, directory.form))
    plain = _plain_matrices(directory) - coded
    for module in sorted(coded):
        scheme = scheme_of(module, directory.config)
        if scheme is None:
            wrong.append(f"{module} is quantised, and config.json says that it is not")
        elif recorded and recorded.get(module) != scheme.name:
            wrong.append(f"{module} is {scheme.name} by config.json, {recorded.get(module)} by report.json")
        elif recorded and directory.records[module].get("inputs") != scheme.inputs:
            wrong.append(f"{module} has inputs of {scheme.inputs} by config.json, not by report.json")
    wrong += [
        f"{module} is not quantised, and config.json says that it is"
        for module in sorted(plain)
        if directory.form != "mlx" and scheme_of(module, directory.config) is not None  # tensors tell in mlx
    ]
    wrong += [f"{name} is in report.json and is not quantised" for name in sorted(recorded.keys() - coded)]
    return wrong


def _plain_matrices(directory: Directory) -> set[str]:
    return {name.removesuffix(".weight") for name, tensor in directory.tensors.items() if _plain_matrix(tensor)}


def _plain_matrix(tensor: Tensor) -> bool:
    """A matrix that a loader might take for a quantised linear: inside a layer, or outside and no embedding."""
    path, _, part = tensor.name.rpartition(".")
    leaf = path.rpartition(".")[2]
    table = re.search(r"emb|wte|wpe", leaf) is not None and leaf not in HEADS
    inside = re.search(r"(^|\.)\d+\.", path) is not None
    return part == "weight" and len(tensor.shape) == 2 and (inside or not table)


def _missing(keys: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    return [f"quantization_config has no {key!r}" for key in keys if key not in settings]


def _gptq_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    if wrong := _missing(_GPTQ_KEYS, settings):
        return wrong
    if settings["bits"] not in (2, 3, 4, 8):
        wrong.append(f"bits is {settings['bits']}")
    if settings["checkpoint_format"] != ("gptq" if settings["sym"] else "gptq_v2"):
        wrong.append(f"checkpoint_format is {settings['checkpoint_format']} with sym {settings['sym']}")
    if not 0 < settings.get("damp_percent", 0.01) < 1:
        wrong.append("damp_percent is not between 0 and 1")
    if read_json(directory.path / "quantize_config.json") != settings:
        wrong.append("quantize_config.json and quantization_config differ")
    coded = quantised_modules(directory.tensors, "gptq")
    inside = sorted(module for module in coded if re.search(r"(^|\.)\d+\.", module))
    if settings["lm_head"] != (len(inside) < len(coded)):
        wrong.append(f"lm_head is {settings['lm_head']}, which the tensors deny")
    listed = settings.get("modules_in_block_to_quantize")
    if listed is not None and sorted(name for part in listed for name in part) not in (inside, sorted(coded)):
        wrong.append("modules_in_block_to_quantize does not list what is quantised")
    if listed is None and any(rule.startswith("-:") for rule in settings.get("dynamic") or {}):
        wrong.append("modules are skipped by `dynamic`, and modules_in_block_to_quantize is missing")
    return wrong


def _awq_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    return awq.config_wrongs(settings, _plain_matrices(directory) | set(quantised_modules(directory.tensors, "awq")))


def _auto_round_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    if wrong := _missing(_AUTO_ROUND_KEYS, settings):
        return wrong
    if settings["data_type"] != "int":
        wrong.append(f"data_type is {settings['data_type']!r}")
    if settings["packing_format"] != "auto_round:auto_gptq" or settings["sym"] is not True:
        wrong.append(f"packing_format is {settings['packing_format']} with sym {settings['sym']}")
    wrong += [
        f"extra_config speaks of {name} without its bits, or of a grid that is not symmetric"
        for name, said in settings["extra_config"].items()
        if "bits" not in said or (said["bits"] < 16 and said.get("sym") is not True)
    ]
    return wrong


def _packed_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    if wrong := _missing(_PACKED_KEYS, settings):
        return wrong
    if settings["quantization_status"] != "compressed":
        wrong.append(f"quantization_status is {settings['quantization_status']!r}, so loaders ignore the codes")
    ways = {group.get("format") for group in settings["config_groups"].values()}
    whole = next(iter(ways)) if len(ways) == 1 else "mixed-precision"
    if settings["format"] != whole or not ways <= {PACKED, INTEGERS, FLOATS, MXFP8, *FLOAT4_PARTS}:
        wrong.append(f"format is {settings['format']!r}, those of config_groups come to {whole!r}")
    if not settings["config_groups"]:
        wrong.append("config_groups is empty")
    for name, group in settings["config_groups"].items():
        wrong += [f"{name} has no {key!r}" for key in ("targets", "format", "weights") if key not in group]
        if unknown := set(group.get("weights", ())) - _WEIGHT_KEYS:
            wrong.append(f"{name} has unknown keys in weights: {', '.join(sorted(unknown))}")
    coded = quantised_modules(directory.tensors, "compressed-tensors")
    linear = any("Linear" in group.get("targets", ()) for group in settings["config_groups"].values())
    if linear and not HEADS & (set(coded) | set(settings["ignore"])):
        wrong.append("ignore does not name the head, which loaders would take for quantised")
    for name in settings["ignore"]:
        if name in coded:
            wrong.append(f"{name} is quantised and in ignore")
    return wrong


def _fp8_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    return _missing(_FP8_KEYS, settings)


def _modelopt_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    if wrong := _missing(_MODELOPT_KEYS, settings):
        return wrong
    other = read_json(directory.path / "hf_quant_config.json").get("quantization", {})
    pairs = {
        "quant_algo": settings["quant_algo"],
        "exclude_modules": settings["ignore"],
        "quantized_layers": settings.get("quantized_layers"),
    }
    if "NVFP4" in settings["quant_algo"]:
        pairs["group_size"] = 16
    return [
        f"{key} of hf_quant_config.json and quantization_config differ"
        for key, value in pairs.items()
        if other.get(key) != value
    ]


def _bitsandbytes_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    if wrong := _missing(_BITSANDBYTES_KEYS, settings):
        return wrong
    if settings["load_in_4bit"] == settings["load_in_8bit"]:
        wrong.append("load_in_4bit and load_in_8bit say the same")
    if settings["load_in_4bit"] and settings.get("bnb_4bit_quant_type") != "nf4":
        wrong.append(f"bnb_4bit_quant_type is {settings.get('bnb_4bit_quant_type')!r}")
    if not HEADS & set(settings["llm_int8_skip_modules"]):
        wrong.append("llm_int8_skip_modules does not name the head, which loaders would take for quantised")
    return wrong


def _mlx_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    return mlx_wrongs(directory.config, settings)


def _own_wrongs(directory: Directory, settings: Mapping[str, Any]) -> list[str]:
    return [] if isinstance(settings.get("modules"), dict) else ["quantization_config has no 'modules'"]
