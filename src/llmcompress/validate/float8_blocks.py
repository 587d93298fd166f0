"""8-bit floats with scales of blocks, decoded by numpy alone: MXFP8 and tiles.

Part of `verify`'s second reader: imports nothing that takes part in writing (formats, packing, grids, store), on
purpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcompress.validate.matrix import E4M3, FLOATS, StoredMatrix, StoredScheme, shaped, zero_scales
from llmcompress.validate.stored import Array, DamageError, Tensor

MXFP8 = "mxfp8-quantized"
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_INPUTS = {MXFP8: (None, "mxfp8"), FLOATS: (None, "fp8-group")}


@dataclass(frozen=True)
class StoredFloat8(StoredMatrix):
    """codes F8_E4M3 [rows, in], or U32 that hold four each; scale float32 [row tiles, column tiles].

    A tile has `tall` x `wide` weights.
    """

    codes: Tensor
    scale: Array
    tall: int
    wide: int

    def decode(self, rows: slice) -> Array:
        values: Array = E4M3[self.codes.array()[rows].view(np.uint8)] * self._spread(rows)
        return values

    def reach(self, rows: slice, weight: Array) -> Array:
        scale = np.maximum(self._spread(rows), 1e-30)
        _, exponent = np.frexp(np.abs(weight) / scale)  # the value lies in [2^(exponent-1), 2^exponent)
        step = scale * np.exp2(np.clip(exponent - 1, -6, 8) - 3)
        outside = np.maximum(np.abs(weight) - 448 * scale, 0)
        far: Array = step / 2 + outside + 1e-4 * step + 1e-6 * np.abs(weight)  # ties decided in float32
        return far

    def _spread(self, rows: slice) -> Array:
        tall = self.scale[np.arange(rows.start, rows.stop) // self.tall]
        return np.repeat(tall, self.wide, axis=1)[:, : self.width]


def float8_scheme(module: str, stored: str, weights: Mapping[str, Any], inputs: str | None) -> StoredScheme:
    """What config.json says of a module; DamageError where it is not what vLLM takes for this kind of storage."""
    wanted = {"num_bits": 8, "type": "float", "symmetric": True, **(_MX if stored == MXFP8 else {"strategy": "block"})}
    if wrong := [key for key, value in wanted.items() if weights.get(key) != value]:
        raise DamageError(f"{module} is {stored}, and its weights have another {wrong[0]} than {wanted[wrong[0]]}")
    if inputs not in _INPUTS.get(stored, ()):
        raise DamageError(f"{module} has blocks of 8-bit floats as {stored} with inputs of {inputs}")
    if stored == MXFP8:
        return StoredScheme(8, 32, True, stored=stored, inputs=inputs, kind="mxfp8")
    tall, wide = weights.get("block_structure") or (0, 0)
    if tall < 1 or wide < 1:
        raise DamageError(f"{module} has blocks of {tall} x {wide}")
    return StoredScheme(8, wide, True, stored=stored, inputs=inputs, kind=f"fp8-{tall}x{wide}")


def read_float8(
    module: str,
    scheme: StoredScheme,
    tensors: Mapping[str, Tensor],
    called: str = "weight_scale",
    apart: bool = False,
) -> tuple[StoredMatrix, list[str]]:
    """The matrix of a module and what is wrong with it; DamageError where it cannot be decoded at all.

    called: what the tensor of scales is called. apart: it has an axis of one behind that of the rows and the columns.
    """
    codes, scale = (tensors[f"{module}.{name}"] for name in ("weight", called))
    if len(codes.shape) != 2:
        raise DamageError(f"{codes.name} is no matrix")
    rows, width = shaped(codes, ("F8_E4M3",), codes.shape).shape
    tall, wide = 1, scheme.size
    if scheme.stored == MXFP8:
        if width % wide:
            raise DamageError(f"{codes.name} is no matrix of whole groups")
        exponent = shaped(scale, ("U8",), (rows, width // wide)).array()
        good, scales = exponent != 255, np.ldexp(np.float32(1), exponent.astype(np.int32) - 127)
    else:
        tall = int(scheme.kind.removeprefix("fp8-").partition("x")[0])
        tiles = -(-rows // tall), -(-width // wide)
        stored = (tiles[0], 1, tiles[1], 1) if apart else tiles
        scales = shaped(scale, ("BF16", "F16", "F32"), stored).floats().reshape(tiles)
        good = np.isfinite(scales) & (scales >= 0)
    faults = [] if good.all() else [f"{scale.name} has scales that are not positive numbers"]
    faults += [*zero_scales(scale.name, scales), *no_numbers(codes)]
    return StoredFloat8(module, scheme, rows, width, codes, scales, tall, wide), faults


def no_numbers(codes: Tensor) -> list[str]:
    """The fault of bytes that hold codes E4M3, where one of them stands for no number."""
    bad = any(((piece.view(np.uint8) & 0x7F) == 0x7F).any() for piece in codes.chunks())
    return [f"{codes.name} has codes that are no numbers"] if bad else []
