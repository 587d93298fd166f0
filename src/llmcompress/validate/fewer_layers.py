"""A source as a model of fewer layers has it: the tensors of the layers that are left, under their new numbers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcompress.validate.stored import DamageError, Tensor


def drops_layers(report: Mapping[str, Any]) -> bool:
    """Whether a run left whole layers out."""
    return isinstance(report.get("depth"), Mapping)


def speaks_of_layers(key: str) -> bool:
    """Whether a key of config.json may be another once layers are gone."""
    return "layer" in key or key == "decoder_sparse_step"


def left_of(report: Mapping[str, Any], originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the source without the layers that the report calls removed; DamageError if it does not say which.

    The number of a layer is the first in a tensor's name.
    """
    removed = report["depth"].get("removed")
    if not isinstance(removed, list) or not all(isinstance(number, int) for number in removed):
        raise DamageError("report.json does not say which layers were removed")
    left = {}
    for name, tensor in originals.items():
        parts = name.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if place is None:
            left[name] = tensor
        elif (number := int(parts[place])) not in removed:
            parts[place] = str(number - sum(other < number for other in removed))
            left[".".join(parts)] = replace(tensor, name=".".join(parts))
    return left
