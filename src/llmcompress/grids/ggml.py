"""Tensor types of GGUF files as one grid of many names: which types a run is asked for, and who encodes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmcompress.grids.base import GridOptions, GridRequest, InputSpec, Search, Spec
from llmcompress.grids.block_type import BlockType
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import gguf_specs
from llmcompress.lazy import Tensor

if TYPE_CHECKING:
    from llmcompress.workers import Workers


class GgufTypes(BaseModel):
    """Types of GGUF in place of bits and groups.

    type: a mixture such as Q4_K_M, or, for one matrix, a tensor type such as Q6_K. pure: its default type everywhere.
    output, embedding: tensor types of the head and of the embedding. tensors: tensor types by pattern of GGUF names.
    search: how scales are found (grids/encoders.py). allow_requantize: whether what is quantised already in a GGUF file
    may be decoded and rounded anew.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str = Field(pattern=r"^\w+$")  # the default name of the output ends with it
    pure: bool = False
    output: str | None = None
    embedding: str | None = None
    tensors: dict[str, str] = Field(default_factory=dict)
    search: Literal["compat", "fast", "best"] = "best"
    allow_requantize: bool = False


class GgufOptions(GridOptions):
    """What a method has for types of GGUF."""

    gguf: GgufTypes | None = Field(None, description="types of GGUF in place of bits and groups")


def gguf_types(method: object) -> GgufTypes | None:
    """The types of GGUF that a method asks for; None where it asks for another grid."""
    return getattr(method, "gguf", None)


class Ggml(BlockType):
    """Tensor types of GGUF files."""

    name = "ggml"
    place = 99
    pattern = "|".join(BLOCK_TYPES)
    known = BLOCK_TYPES
    options = GgufOptions

    def spec(self, asked: Any) -> Spec:
        return gguf_specs()[asked.gguf.type]

    def objection(self, asked: Any) -> str | None:
        alone = asked.gguf is None or (asked.type, asked.outliers, asked.activations) == ("int", "none", "none")
        return None if alone else "types of GGUF stand in place of type, outliers and activations"

    def replaces(self, asked: Any) -> bool:
        return asked.gguf is not None

    def label(self, asked: GridRequest, inputs: InputSpec | None) -> str:
        return f"w{asked.bits}"

    def search(self, asked: Any) -> Search:
        found: Search = asked.gguf.search
        return found

    def rounded(self, weight: Tensor, spec: Spec, search: Search, workers: Workers, importance: Tensor | None) -> Coded:
        from llmcompress.grids.encoders import encode

        return encode(weight, spec, search, workers, importance)


GRID = Ggml()
