"""LoRA adapters as PEFT stores them: adapter_config.json beside adapter_model.safetensors."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import FLOAT_TYPES, TensorSpec
from llmcompress.isolation import probe
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import ModelHeaders, inside, read_file_header, read_json
from llmcompress.store.output import OutputDirectory

CONFIG, STEM = "adapter_config.json", "adapter_model"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PART = re.compile(
    r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_[AB]|lora_magnitude_vector)(\.weight)?"
)
_FACTORS = {"lora_A.weight": "a", "lora_embedding_A": "a", "lora_B.weight": "b", "lora_embedding_B": "b"}
_OTHERS = {"lora_B.bias": "bias", "lora_magnitude_vector": "magnitude"}
# keys of a config that make an adapter compute something else, unless their values are empty
_UNKNOWN = ("layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
            "use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "velora_config")  # fmt: skip


class AdapterDirectory(OutputDirectory):
    """An adapter directory that is being written; it overwrites only another adapter."""

    told_by = (CONFIG,)


@dataclass(frozen=True)
class Correction:
    """A module of transformers' model, and the tensor names of its correction scale * b [out, rank] * a [rank, in].

    table: the module is an embedding, of which `out` is the width and `in` the number of rows. magnitude: the norm that
    each output's weights have together with the correction (DoRA). bias: times scale, added to the module's bias.
    """

    module: str
    a: str
    b: str
    scale: float
    table: bool = False
    magnitude: str | None = None
    bias: str | None = None


class Adapter:
    """An adapter on disk. corrections: in order of module names. saved: tensors that replace parameters, by the path of
    a parameter in transformers' model. config: adapter_config.json.
    """

    def __init__(self, path: Path) -> None:
        """CheckpointError if `path` is no LoRA adapter, is damaged, or uses unsupported settings."""
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path} holds no adapter ({CONFIG})", "give a directory as PEFT saves it")
        self.path = path
        self.config = config = read_json(inside(path, path / CONFIG))
        if config.get("peft_type") != "LORA":
            kind = config.get("peft_type")
            raise CheckpointError(f"{path / CONFIG}: peft_type {kind!r} is not supported", "LORA is")
        for key in _UNKNOWN:
            if config.get(key):
                raise CheckpointError(f"{path / CONFIG}: {key} {config[key]!r} is not supported", "LoRA and DoRA are")
        if not (_is_rank(config.get("r")) and _is_number(config.get("lora_alpha"))):
            raise CheckpointError(f"{path / CONFIG} does not say r and lora_alpha")
        file = inside(path, path / f"{STEM}.safetensors")
        self._weights = Checkpoint(ModelHeaders(path, {}, read_file_header(file), (file,)))
        self.corrections, self.saved = self._read_names()

    @property
    def plain(self) -> bool:
        """Whether there is nothing beside corrections that are added to linears."""
        beside = any(item.table or item.magnitude or item.bias for item in self.corrections)
        return not self.saved and not beside

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the config and of all tensors."""
        digest = hashlib.sha256((self.path / CONFIG).read_bytes())
        with (self.path / f"{STEM}.safetensors").open("rb") as file:
            while part := file.read(1 << 22):
                digest.update(part)
        return digest.hexdigest()

    def _read_names(self) -> tuple[list[Correction], dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        saved: dict[str, str] = {}
        for name, stored in self._weights.headers.tensors.items():
            path = name.removeprefix(_PREFIX)
            if path == name or stored.spec.dtype not in FLOAT_TYPES:
                raise CheckpointError(f"{self.path}: tensor {name} is not one of a LoRA adapter")
            match = _PART.fullmatch(path)
            if match is not None:
                parts = found.setdefault(match[1], {"table": "1"} if "embedding" in match[2] else {})
                parts[{**_FACTORS, **_OTHERS}[match[2]]] = name
            elif ".lora_" in path or not path.endswith((".weight", ".bias")):
                raise CheckpointError(f"{self.path}: tensor {name} is not one of a LoRA adapter")
            else:
                saved[path.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = name

        def failed(reason: str) -> CheckpointError:
            return CheckpointError(f"{self.path / CONFIG}: patterns of modules cannot be used: {reason}")

        modules = sorted(found)
        probe(lambda: [self._scale(module) for module in modules], failed, 100 * len(modules))
        return [self._correction(module, found[module]) for module in modules], saved

    def _correction(self, module: str, parts: Mapping[str, str]) -> Correction:
        tensors = self._weights.headers.tensors
        shapes = {part: tensors[name].spec.shape for part, name in parts.items() if part != "table"}
        a, b = shapes.get("a", ()), shapes.get("b", ())
        if len(a) != 2 or len(b) != 2:
            raise CheckpointError(f"{self.path}: {module} has not one pair of lora_A and lora_B")
        rank, scale = self._scale(module)
        if (a[0], b[1]) != (rank, rank):
            raise CheckpointError(
                f"{self.path}: {module} has lora_A of {a[0]} rows and lora_B of {b[1]} columns, r is {rank}"
            )
        if any(shapes.get(part, (b[0],)) != (b[0],) for part in ("magnitude", "bias")):
            raise CheckpointError(f"{self.path}: {module} has a magnitude or bias that is not of {b[0]} outputs")
        if ("magnitude" in parts) != bool(self.config.get("use_dora")):
            said = "has a" if "magnitude" in parts else "lacks its"
            raise CheckpointError(f"{self.path}: {module} {said} lora_magnitude_vector, {CONFIG} says otherwise")
        more = {part: parts[part] for part in ("magnitude", "bias") if part in parts}
        return Correction(module, parts["a"], parts["b"], scale, "table" in parts, **more)

    def _scale(self, module: str) -> tuple[int, float]:
        """Rank and scale of a module; CheckpointError."""
        config = self.config
        rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
        alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
        if not (_is_rank(rank) and _is_number(alpha)):
            raise CheckpointError(f"{self.path / CONFIG}: rank or alpha of {module} is no number")
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def targets(self, module: str, layer: int) -> bool:
        """Whether the config says that a linear of a layer has a correction; re.error for a broken pattern."""
        config = self.config
        only = config.get("layers_to_transform")
        if only is not None and layer not in (only if isinstance(only, list) else [only]):
            return False
        wanted = config.get("target_modules")
        return (wanted == "all-linear" or _names(wanted, module)) and not _names(config.get("exclude_modules"), module)

    def shape(self, item: Correction) -> tuple[int, int]:
        """Shape [out, in] of the corrected matrix."""
        tensors = self._weights.headers.tensors
        return tensors[item.b].spec.shape[0], tensors[item.a].spec.shape[1]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of the adapter."""
        return self._weights.headers.tensors[name].spec.shape

    def value(self, name: str) -> Tensor:
        """A tensor of the adapter; WeightsError for values that are not finite."""
        return self._weights.read_finite(name)

    def read(self, item: Correction) -> tuple[Tensor, Tensor]:
        """b [out, rank] times scale, and a [rank, in]."""
        return self.value(item.b) * item.scale, self.value(item.a)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that matches a module, as PEFT looks for it."""
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _names(wanted: Any, module: str) -> bool:
    """Whether a list of names, or a pattern, names a module."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted or ())


def adapter_specs(modules: Iterable[tuple[str, tuple[int, int], str]], rank: int) -> list[TensorSpec]:
    """Tensors of an adapter, from the path in transformers' model, the shape [out, in] and the type of each matrix."""
    specs = []
    for module, (rows, columns), dtype in modules:
        specs += [
            TensorSpec(f"{_PREFIX}{module}{_A}", dtype, (rank, columns)),
            TensorSpec(f"{_PREFIX}{module}{_B}", dtype, (rows, rank)),
        ]
    return specs


def adapter_config(
    base: str, rank: int, adapted: Sequence[str], present: Sequence[str], conv1d: bool
) -> dict[str, Any]:
    """adapter_config.json with a scaling of 1. base: name of the model. adapted: the corrected modules among those
    `present`: named by the last part of their names if all modules of that last part are corrected. conv1d: whether
    matrices are stored [in, out]."""
    wanted = set(adapted)
    partial = {_leaf(module) for module in present if module not in wanted}
    targets = {_leaf(module) if _leaf(module) not in partial else module for module in adapted}
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": conv1d,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
