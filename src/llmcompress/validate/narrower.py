"""A source beside a model whose feed-forward is narrower: which channels stayed, and whether these are the source's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcompress.validate.directory import CONV1D, Directory, read_arrays
from llmcompress.validate.stored import Array, DamageError, Tensor

CHANNELS = "channels.npz"
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")


def narrows(report: Mapping[str, Any]) -> bool:
    """Whether a run left channels of the feed-forward out."""
    return isinstance(report.get("width"), Mapping)


def tells_width(directory: Directory, config: Mapping[str, Any], key: str) -> bool:
    """Whether a key of config.json is the width of the feed-forward, the source's before and the output's after."""
    said, width = directory.report["width"], directory.config.get(key)
    return key in _WIDTHS and config.get(key) in (said.get("before"), None) and width == said.get("after")


def cut(directory: Directory, originals: Mapping[str, Tensor]) -> set[str]:
    """Names of tensors that have another shape than in the source."""
    return {name for name, tensor in directory.tensors.items()
            if name in originals and tensor.shape != originals[name].shape}  # fmt: skip


def narrower_wrongs(directory: Directory, originals: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with the tensors that were cut, which in each layer are several written to, and one that reads.

    Those written to, such as gate and up, are rows of the source, to the bit. The one that reads may have been fitted
    anew: then it differs from the source's columns, by less than there was. DamageError for channels that are not said.
    """
    said = directory.report["width"]
    kept = _channels(directory, said)
    wrong: list[str] = []
    readers: dict[int, int] = dict.fromkeys(kept, 0)
    for name in sorted(cut(directory, originals)):
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
        if not (reads and said["repair"]):
            wrong += [] if np.array_equal(there, expected) else [f"{name} does not hold the channels of the source"]
        else:
            wrong += _fitted_wrongs(name, there, expected, original)
    wrong += [f"layer {layer} has {count} matrices that read its channels, not one"
              for layer, count in readers.items() if count != 1]  # fmt: skip
    return wrong


def _fitted_wrongs(name: str, there: Array, expected: Array, original: Tensor) -> list[str]:
    missed = float(np.linalg.norm(there.astype(np.float64) - expected))
    if missed == 0:
        return [f"{name} was to be fitted to the channels that are left, and holds those of the source"]
    if not missed < float(np.linalg.norm(original.floats().astype(np.float64))):
        return [f"{name} is no nearer to the source than zeros would be"]
    return []


def _axis(written: Tensor, original: Tensor, before: int, after: int) -> int | None:
    """The one dimension that was cut."""
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
