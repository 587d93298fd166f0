"""The schemes that config.json declares for the quantised matrices of a directory.

Part of the second reader: imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

import re
from collections.abc import Mapping
from typing import Any

from llmcompress.validate.awq import skipped
from llmcompress.validate.float4 import FLOAT4_PARTS, factored_scheme, float4_scheme
from llmcompress.validate.float8_blocks import MXFP8, float8_scheme
from llmcompress.validate.matrix import FLOATS, INTEGERS, PACKED, StoredScheme
from llmcompress.validate.mlx_codes import MLX_FLOATS, MLX_PARTS, mlx_scheme
from llmcompress.validate.stored import DamageError
from llmcompress.validate.table_codes import TABLE_PARTS, missing_table_parts, table_scheme

PARTS: Mapping[str, tuple[str, ...]] = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "auto-round": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
    ),
    "fp8": ("weight_scale_inv",),
    "modelopt": ("weight_scale", "weight_scale_2", "input_scale"),
    "mlx": MLX_PARTS,
    **TABLE_PARTS,
}
_INPUTS = {
    (8, "int", True, "token", None, True, None): "int8-token",
    (8, "int", True, "tensor", None, False, None): "int8-tensor",
    (8, "float", True, "token", None, True, None): "fp8-token",
    (8, "float", True, "tensor", None, False, None): "fp8-tensor",
    (8, "float", True, "group", 128, True, None): "fp8-group",
    (8, "float", True, "group", 32, True, "torch.uint8"): "mxfp8",
    (4, "float", True, "group", 32, True, "torch.uint8"): "mxfp4",
    (4, "float", True, "tensor_group", 16, "local", "torch.float8_e4m3fn"): "nvfp4",
}
_MODELOPT: Mapping[str, StoredScheme] = {
    "NVFP4": factored_scheme("nvfp4"),
    "W4A16_NVFP4": factored_scheme(None),
    "FP8": StoredScheme(8, -1, True, stored=FLOATS, inputs="fp8-tensor", kind="fp8-tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": StoredScheme(8, -1, True, stored=FLOATS, inputs="fp8-token", kind="fp8-row"),
    "FP8_PB_WO": StoredScheme(8, 128, True, stored=FLOATS, inputs="fp8-group", kind="fp8-128x128"),
    "MXFP8": StoredScheme(8, 32, True, stored=MXFP8, inputs="mxfp8", kind="mxfp8"),
}
STORED = {INTEGERS: "I8", FLOATS: "F8_E4M3"}  # stored type of codes of one byte each


def format_of(config: Mapping[str, Any]) -> str:
    """Name of the format that config.json declares; DamageError for an unknown format."""
    settings = config.get("quantization_config")
    if settings is None:
        return "dense"
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    form = method.removeprefix("llmcompress-") if isinstance(method, str) else None
    if form is None or form not in PARTS:
        raise DamageError(f"quant_method {method!r} is not known")
    return form


def scheme_of(module: str, config: Mapping[str, Any]) -> StoredScheme | None:
    """The scheme that config.json declares for a linear; None if the linear is not quantised."""
    settings = config["quantization_config"]
    schemes = {
        "gptq": _gptq_scheme,
        "awq": _awq_scheme,
        "auto-round": _auto_round_scheme,
        "compressed-tensors": _packed_scheme,
        "fp8": _blocks_scheme,
        "modelopt": _modelopt_scheme,
        "mlx": mlx_scheme,
    }
    return schemes.get(settings["quant_method"], table_scheme)(module, settings)


def _gptq_scheme(module: str, settings: Mapping[str, Any]) -> StoredScheme | None:
    merged = dict(settings)
    for rule, values in (settings.get("dynamic") or {}).items():
        if re.match(rule[2:] if rule[:2] in ("-:", "+:") else rule, module):
            if rule.startswith("-:"):
                return None
            merged |= values
            break
    if not re.search(r"(^|\.)\d+\.", module) and not settings.get("lm_head"):
        return None
    order = bool(settings.get("desc_act"))
    return StoredScheme(int(merged["bits"]), int(merged["group_size"]), bool(merged["sym"]), order)


def _awq_scheme(module: str, settings: Mapping[str, Any]) -> StoredScheme | None:
    if True in skipped(module, settings):
        return None
    return StoredScheme(int(settings["bits"]), int(settings["group_size"]), not settings["zero_point"])


def _auto_round_scheme(module: str, settings: Mapping[str, Any]) -> StoredScheme | None:
    extra = settings["extra_config"]
    said = {**settings, **extra.get(module, {})}
    blocks = settings["block_name_to_quantize"].split(",")
    inside = any(re.match(rf"{re.escape(block)}\.\d+\.", module) for block in blocks)
    if said["bits"] >= 16 or not (inside or module in extra):
        return None
    return StoredScheme(int(said["bits"]), int(said["group_size"]), bool(said["sym"]))


def _packed_scheme(module: str, settings: Mapping[str, Any]) -> StoredScheme | None:
    def names(target: str) -> bool:
        return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module

    if any(names(target) for target in settings.get("ignore") or ()):
        return None
    groups = list(settings["config_groups"].values())
    exact = [group for group in groups if any(names(target) for target in group["targets"])]
    chosen = exact or [group for group in groups if "Linear" in group["targets"]]
    if not chosen:
        return None
    if len(chosen) > 1:
        raise DamageError(f"{module} belongs to more than one config group")
    weights, stored = chosen[0]["weights"], chosen[0]["format"]
    size = weights["group_size"] if weights["strategy"] == "group" else -1
    inputs = _inputs_said(module, chosen[0].get("input_activations"))
    if stored in FLOAT4_PARTS:
        return float4_scheme(module, stored, weights, inputs)
    if stored == MXFP8 or weights["strategy"] == "block":
        return float8_scheme(module, stored, weights, inputs)
    kind = "" if stored != FLOATS else "fp8-tensor" if weights["strategy"] == "tensor" else "fp8-row"
    scheme = StoredScheme(int(weights["num_bits"]), int(size), bool(weights["symmetric"]), False, stored, inputs, kind)
    if stored != PACKED and (scheme.bits, scheme.size, scheme.symmetric) != (8, -1, True):
        raise DamageError(f"{module} is {stored}, and its weights are not of 8 bits with one symmetric scale per row")
    if stored not in (PACKED, *STORED) or (stored == FLOATS) != (weights["type"] == "float"):
        raise DamageError(f"{module} has weights of type {weights['type']} stored as {stored}")
    if stored == INTEGERS and inputs is None:
        raise DamageError(f"{module} is {stored} without rounded inputs, which engines refuse")
    return scheme


def _blocks_scheme(module: str, settings: Mapping[str, Any]) -> StoredScheme | None:
    if module in settings["modules_to_not_convert"] or module.rpartition(".")[2] in settings["modules_to_not_convert"]:
        return None
    if settings["fmt"] != "e4m3" or settings["activation_scheme"] != "dynamic":
        raise DamageError(f"{module} is {settings['fmt']} with {settings['activation_scheme']} scales of inputs")
    said = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block"}
    return float8_scheme(module, FLOATS, {**said, "block_structure": settings["weight_block_size"]}, "fp8-group")


def _modelopt_scheme(module: str, settings: Mapping[str, Any]) -> StoredScheme | None:
    if module in settings["ignore"] or module.rpartition(".")[2] in settings["ignore"]:
        return None
    algorithm = settings["quant_algo"]
    if algorithm == "MIXED_PRECISION":
        if module not in settings["quantized_layers"]:
            return None
        algorithm = settings["quantized_layers"][module]["quant_algo"]
    if algorithm.upper() not in _MODELOPT:
        raise DamageError(f"{module} is {algorithm}, which is no algorithm that is written")
    scheme = _MODELOPT[algorithm.upper()]
    groups = settings["config_groups"].values()
    told = [group for group in groups if module in group["targets"] or group["targets"] == ["Linear"]]
    if len(told) != 1 or (told[0]["input_activations"] is None) != (scheme.inputs is None):
        raise DamageError(f"{module} has inputs of {scheme.inputs} by {algorithm}, and config_groups deny it")
    return scheme


def _inputs_said(module: str, said: Mapping[str, Any] | None) -> str | None:
    if said is None:
        return None
    keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
    found = (*(said.get(key) for key in keys), said.get("scale_dtype"))
    if found not in _INPUTS:
        raise DamageError(f"inputs of {module} are rounded in a way that no engine knows")
    return _INPUTS[found]


def missing_parts(module: str, parts: set[str], config: Mapping[str, Any]) -> list[str]:
    """Tensors that the module's declared scheme asks for and that `parts` lacks."""
    form = format_of(config)
    if form in TABLE_PARTS:
        return sorted(missing_table_parts(form, parts))
    wanted = set(PARTS[form]) - {"weight_zero_point", "weight_global_scale", "input_scale", "input_global_scale"}
    scheme = scheme_of(module, config) if form in ("compressed-tensors", "modelopt") else None
    if form == "modelopt":
        asked = {"weight_scale"} | ({"weight_scale_2"} if scheme is None or scheme.kind == "nvfp4" else set())
        fixed = scheme is not None and scheme.kind == scheme.inputs == "fp8-tensor"
        return sorted((asked | ({"input_scale"} if fixed else set())) - parts)
    if form == "mlx" and mlx_scheme(module, config["quantization_config"]).kind in MLX_FLOATS:
        wanted.discard("biases")
    if scheme is not None:
        if scheme.stored in FLOAT4_PARTS:
            wanted = set(FLOAT4_PARTS[scheme.stored]) | ({"input_global_scale"} if scheme.inputs == "nvfp4" else set())
        elif scheme.stored != PACKED:
            wanted = {"weight_scale"}
        if scheme.inputs is not None and scheme.inputs.endswith("-tensor"):
            wanted.add("input_scale")
    return sorted(wanted - parts)
