"""LoRA adapters as PEFT stores them: adapter_config.json beside adapter_model.safetensors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import FLOAT_TYPES, TensorSpec
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import ModelHeaders, inside, read_file_header, read_json
from llmcompress.store.output import OutputDirectory

CONFIG, STEM = "adapter_config.json", "adapter_model"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# keys of a config, and the only supported values
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "target_parameters": ([], None),
}


class AdapterDirectory(OutputDirectory):
    """An adapter directory that is being written; it overwrites only another adapter."""

    told_by = (CONFIG,)


@dataclass(frozen=True)
class Correction:
    """A module of transformers' model, and the tensor names of its correction scale * b [out, rank] * a [rank, in]."""

    module: str
    a: str
    b: str


class Adapter:
    """An adapter on disk. corrections: in order of module names. scale: the factor of every product b a."""

    def __init__(self, path: Path) -> None:
        """CheckpointError if `path` is no LoRA adapter, is damaged, or uses unsupported settings."""
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path} holds no adapter ({CONFIG})", "give a directory as PEFT saves it")
        self.path = path
        config = read_json(path / CONFIG)
        for key, values in _ONLY.items():
            if config.get(key) not in values:
                raise CheckpointError(f"{path / CONFIG}: {key} {config.get(key)!r} is not supported", "plain LoRA is")
        self.rank, alpha = config.get("r"), config.get("lora_alpha")
        if not (isinstance(self.rank, int) and self.rank > 0 and isinstance(alpha, int | float)):
            raise CheckpointError(f"{path / CONFIG} does not say r and lora_alpha")
        self.scale = alpha / (math.sqrt(self.rank) if config.get("use_rslora") else self.rank)
        file = inside(path, path / f"{STEM}.safetensors")
        self._weights = Checkpoint(ModelHeaders(path, {}, read_file_header(file), (file,)))
        self.corrections = self._paired()

    def _paired(self) -> list[Correction]:
        names = self._weights.headers.tensors
        found = []
        for name, stored in names.items():
            module = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
            a, b = f"{_PREFIX}{module}{_A}", f"{_PREFIX}{module}{_B}"
            matrix = len(stored.spec.shape) == 2 and stored.spec.dtype in FLOAT_TYPES
            if name not in (a, b) or a not in names or b not in names or not matrix:
                raise CheckpointError(f"{self.path}: tensor {name} is not one of a pair of lora_A and lora_B")
            if name == a:
                found.append(Correction(module, a, b))
        return sorted(found, key=lambda item: item.module)

    def shape(self, item: Correction) -> tuple[int, int]:
        """Shape [out, in] of the corrected matrix."""
        tensors = self._weights.headers.tensors
        return tensors[item.b].spec.shape[0], tensors[item.a].spec.shape[1]

    def read(self, item: Correction) -> tuple[Tensor, Tensor]:
        """b [out, rank] times scale, and a [rank, in]; CheckpointError if their ranks differ."""
        b, a = self._weights.read_finite(item.b), self._weights.read_finite(item.a)
        if b.shape[1] != a.shape[0] or a.shape[0] != self.rank:
            raise CheckpointError(f"{self.path}: {item.module} has lora_A of {a.shape[0]} rows, r is {self.rank}")
        return b * self.scale, a


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
