"""The source of a model that lost layers or channels of the feed-forward: what stayed must equal the source."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcompress.validate.directory import CONV1D, Directory, read_arrays
from llmcompress.validate.stored import Array, DamageError, Tensor

CHANNELS = "channels.npz"
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")


def drops_layers(report: Mapping[str, Any]) -> bool:
    """Whether a run left whole layers out."""
    return isinstance(report.get("depth"), Mapping)


def depends_on_depth(key: str) -> bool:
    """Whether removing layers may change this key of config.json."""
    return "layer" in key or key == "decoder_sparse_step"


def renumbered_tensors(report: Mapping[str, Any], originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The source's tensors without removed layers, renumbered; DamageError if the report lacks the layers' numbers.

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


def narrows(report: Mapping[str, Any]) -> bool:
    """Whether a run removed channels of the feed-forward."""
    return isinstance(report.get("width"), Mapping)


def holds_cut_width(directory: Directory, config: Mapping[str, Any], key: str) -> bool:
    """Whether a key of config.json is the feed-forward's width, and changed as report.json recorded."""
    said, width = directory.report["width"], directory.config.get(key)
    return key in _WIDTHS and config.get(key) in (said.get("before"), None) and width == said.get("after")


def cut_tensors(directory: Directory, originals: Mapping[str, Tensor]) -> set[str]:
    """Names of tensors whose shape differs from the source's."""
    return {name for name, tensor in directory.tensors.items()
            if name in originals and tensor.shape != originals[name].shape}  # fmt: skip


def narrower_wrongs(directory: Directory, originals: Mapping[str, Tensor]) -> list[str]:
    """Faults of the cut tensors: in each layer several that write the channels, and one that reads the channels.

    Tensors that write channels, such as gate and up, must equal rows of the source. The one that reads channels may
    have been refitted, and all may have been trained: they then differ by less than the source's norm. DamageError if
    channels are not recorded.
    """
    said = directory.report["width"]
    kept = _channels(directory, said)
    wrong: list[str] = []
    readers: dict[int, int] = dict.fromkeys(kept, 0)
    for name in sorted(cut_tensors(directory, originals)):
        layer = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        if layer is None or layer not in kept:
            wrong.append(f"{name} has another shape than in the source, and is of no layer that was cut")
            continue
        written, original = directory.tensors[name], originals[name]
        axis = _axis(written, original, said["before"], said["after"])
        if axis is None or written.dtype != original.dtype:
            wrong.append(f"{name} has another type, or is not cut from {said['before']} channels to {said['after']}")
            continue
        parts = original.shape[axis] // said["before"]
        places = np.concatenate([kept[layer] + part * said["before"] for part in range(parts)])
        there, expected = written.floats(), np.take(original.floats(), places, axis=axis)
        reads = len(original.shape) == 2 and (axis == 1) != (directory.config.get("model_type") in CONV1D)
        readers[layer] += reads
        trained = bool(directory.records.get(name.removesuffix(".weight"), {}).get("recovered"))
        if not trained and not (reads and said["repair"]):
            wrong += [] if np.array_equal(there, expected) else [f"{name} does not hold the channels of the source"]
        else:
            wrong += _fitted_wrongs(name, there, expected, original, may_equal=trained)
    wrong += [f"layer {layer} has {count} matrices that read its channels, not one"
              for layer, count in readers.items() if count != 1]  # fmt: skip
    return wrong


def _fitted_wrongs(name: str, there: Array, expected: Array, original: Tensor, may_equal: bool) -> list[str]:
    missed = float(np.linalg.norm(there.astype(np.float64) - expected))
    if missed == 0 and not may_equal:
        return [f"{name} was to be fitted to the channels that are left, and holds those of the source"]
    if not missed < float(np.linalg.norm(original.floats().astype(np.float64))):
        return [f"{name} is no nearer to the source than zeros would be"]
    return []


def _axis(written: Tensor, original: Tensor, before: int, after: int) -> int | None:
    """The only dimension that was cut; None if there is no such dimension."""
    if len(written.shape) != len(original.shape):
        return None
    axes = [axis for axis, (new, old) in enumerate(zip(written.shape, original.shape, strict=True)) if new != old]
    if len(axes) != 1:
        return None
    parts, rest = divmod(original.shape[axes[0]], before)
    return axes[0] if rest == 0 and written.shape[axes[0]] == parts * after else None


def _channels(directory: Directory, said: Mapping[str, Any]) -> dict[int, NDArray[np.int64]]:
    """Numbers of the channels that stayed, by layer; DamageError."""
    if not all(isinstance(said.get(key), int) for key in ("before", "after")) or "repair" not in said:
        raise DamageError("report.json does not say how wide the feed-forward was and is")
    arrays = read_arrays(directory.path / CHANNELS)
    if not all(layer.isdecimal() and array.dtype.kind in "iu" for layer, array in arrays.items()):
        raise DamageError(f"{CHANNELS} does not hold numbers of channels by layer")
    found = {int(layer): array.astype(np.int64) for layer, array in arrays.items()}
    for layer, numbers in found.items():
        rising = numbers.ndim == 1 and len(numbers) == said["after"] and bool((np.diff(numbers) > 0).all())
        if not rising or numbers[0] < 0 or numbers[-1] >= said["before"]:
            raise DamageError(f"{CHANNELS} does not name {said['after']} of {said['before']} channels of layer {layer}")
    return found
