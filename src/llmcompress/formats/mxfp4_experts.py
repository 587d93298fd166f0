"""Experts in MXFP4 as gpt-oss ships them (`quant_method: mxfp4`): read, not written.

The tensor P of a block of experts that transformers holds as [experts, in, out] is

    P_blocks  U8  [experts, out, in/32, 16]  two codes in a byte, the first in the low bits
    P_scales  U8  [experts, out, in/32]      powers of two, 2^(byte - 127)

and its biases stay as they are. Of gate_up_proj, outputs of the gate and of the other half take turns.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Reader, Specs, Stack
from llmcompress.formats.read_only import ReadOnlyFormat
from llmcompress.grids.base import Spec
from llmcompress.grids.mxfp4 import GRID, Mxfp4Spec

if TYPE_CHECKING:
    from llmcompress.grids.coded import Coded

_BLOCKS, _SCALES = "_blocks", "_scales"
_SPEC = Mxfp4Spec()
_BYTES = _SPEC.group_size // 2  # of a block


class Mxfp4Experts(ReadOnlyFormat):
    """4-bit floats of experts, all of a layer in one tensor."""

    name = "mxfp4"
    summary = "experts in mxfp4 as gpt-oss ships them; read only"
    marker = ()

    def recognises(self, config: Config) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == "mxfp4"

    def stacks(self, specs: Specs, config: Config) -> dict[str, Stack]:
        found = {}
        for name, blocks in specs.items():
            if not name.endswith(_BLOCKS):
                continue
            stem = name.removesuffix(_BLOCKS)
            scales = specs.get(f"{stem}{_SCALES}")
            if len(blocks.shape) != 4 or blocks.dtype != "U8" or blocks.shape[3] != _BYTES:
                raise CheckpointError(f"{name} is {blocks.dtype} {list(blocks.shape)}, not blocks of {_BYTES} bytes")
            if scales is None or (scales.dtype, scales.shape) != ("U8", blocks.shape[:3]):
                raise CheckpointError(f"{stem}{_SCALES} does not hold one byte for each block of {name}")
            count, rows, groups, _ = blocks.shape
            found[stem] = Stack((count, groups * _SPEC.group_size, rows), (name, scales.name))
        return found

    def grid(self, module: str, config: Config) -> Spec:
        return _SPEC

    def decode_stacked(self, stack: Stack, number: int, read_at: "Reader") -> "Coded":
        blocks, scales = (read_at(part) for part in stack.parts)
        coded = GRID.unpacked(_SPEC, {"weight_packed": blocks.flatten(1), "weight_scale": scales})
        if not bool(coded.grid.scale.isfinite().all()):
            raise CheckpointError(f"{stack.parts[1]} has scales that are not finite, of expert {number}")
        return coded


FORMAT = Mxfp4Experts()
