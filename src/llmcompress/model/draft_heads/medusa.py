"""Heads of Medusa (arXiv:2401.10774, section 3.1), as vLLM up to 0.32 reads them.

Each of several blocks reads what the target's own head reads of a token, and predicts a token that is further away:
block k the one behind k + 1 others. One head serves all blocks, as vLLM allows (`original_lm_head`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from llmcompress.formats.base import TensorSpec
from llmcompress.model.draft_heads.base import (
    CALM,
    HEAD_WEIGHT,
    Drafting,
    DraftShape,
    HeadTarget,
    LearntSlowly,
    LearntTensor,
    Read,
    TargetSample,
    refuse_no_sizes,
    refuse_others,
)

_BLOCKS, _LAYERS = 4, 1
_IDS = "token_map"
_AS_WRITTEN = {"original_lm_head": True, "medusa_fc_bias": False, "logit_scale": 1.0}


def _weight(block: int, layer: int) -> str:
    return f"blocks.{block}.layers.{layer}.weight"


@dataclass(frozen=True)
class MedusaShape(DraftShape):
    """Sizes of a head. blocks: tokens that are drafted. layers: of each block."""

    blocks: int
    layers: int

    kind: ClassVar[str] = "medusa"
    ids_name: ClassVar[str] = _IDS

    @property
    def most(self) -> int:
        return self.blocks

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        square = (self.hidden, self.hidden)
        blocks = {_weight(block, layer): square for block in range(self.blocks) for layer in range(self.layers)}
        return {**blocks, HEAD_WEIGHT: (self.vocabulary, self.hidden)}

    @property
    def values(self) -> int:
        return self.hidden

    @property
    def scores(self) -> int:
        return 0

    @property
    def id_specs(self) -> list[TensorSpec]:
        whole = self.vocabulary == self.target_vocabulary
        return [] if whole else [TensorSpec(_IDS, "I64", (self.vocabulary,))]

    def id_tensors(self, ids: Tensor) -> dict[str, Tensor]:
        return {spec.name: ids for spec in self.id_specs}

    def ids(self, read: Read) -> Tensor:
        return read(_IDS) if self.id_specs else torch.arange(self.vocabulary)

    def config(self, dtype: str, tokens: int, target: str, architectures: Sequence[str]) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": self.kind,
            "hidden_size": self.hidden,
            "vocab_size": self.target_vocabulary,
            "truncated_vocab_size": self.vocabulary,
            "num_heads": self.blocks,
            "num_hidden_layers": self.layers,
            **_AS_WRITTEN,
            "dtype": dtype,
        }

    def head(self, weights: Mapping[str, Tensor]) -> "MedusaHead":
        return MedusaHead(self, weights)


class MedusaHead:
    """A head on its weights. weights: by the names in the file, without ids; of any one type."""

    def __init__(self, shape: MedusaShape, weights: Mapping[str, Tensor]) -> None:
        self.shape, self.weights = shape, weights

    def block(self, number: int, states: Tensor) -> Tensor:
        """The output [..., hidden] of a block on what the target's head reads, [..., hidden]."""
        for layer in range(self.shape.layers):
            states = states + functional.silu(functional.linear(states, self.weights[_weight(number, layer)]))
        return states

    def unrolled(self, embedded: Tensor, states: Tensor, depths: int) -> list[Tensor]:
        """As of `DraftHead`. What was drafted before is not read: `embedded` is of no use."""
        known = [
            torch.cat([torch.zeros_like(states[:depth]), states[: len(states) - depth]]) for depth in range(depths)
        ]
        return [self.block(depth, rows) for depth, rows in enumerate(known)]

    def logits(self, outputs: Tensor) -> Tensor:
        return functional.linear(outputs, self.weights[HEAD_WEIGHT])

    def drafting(self) -> Drafting:
        return _MedusaDrafting(self)


class _MedusaDrafting:
    """The last state that is known, and how many blocks have read it."""

    def __init__(self, head: MedusaHead) -> None:
        self.head = head
        self._last: Tensor | None = None
        self._blocks = 0

    def read(self, embedded: Tensor, states: Tensor) -> Tensor:
        self._last, self._blocks = states[-1], 0
        return self._next()

    def read_own(self, embedded: Tensor) -> Tensor:
        return self._next()

    def _next(self) -> Tensor:
        assert self._last is not None  # something was read before
        self._blocks += 1
        return self.head.block(self._blocks - 1, self._last)


class _Medusa:
    name: ClassVar[str] = MedusaShape.kind
    depths: ClassVar[int] = _BLOCKS
    title: ClassVar[str] = "A head of Medusa"
    tags: ClassVar[tuple[str, ...]] = (name,)
    readers: ClassVar[str] = "vLLM up to 0.32 reads such heads"

    def shape(self, target: HeadTarget, vocabulary: int) -> MedusaShape:
        able = min(vocabulary, target.vocabulary)
        return MedusaShape(target.hidden, able, target.vocabulary, (), _BLOCKS, _LAYERS)

    def start(self, shape: MedusaShape, target: TargetSample, seed: int) -> dict[str, LearntTensor]:
        """Blocks that change nothing, and the target's head."""
        sizes = target.sizes
        blocks = {name: LearntTensor.of(torch.zeros(size), sizes) for name, size in shape.matrices.items()}
        return {**blocks, HEAD_WEIGHT: LearntSlowly.of(target.rows * (CALM * target.slope))}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == self.name

    def read(self, file: Path, config: Mapping[str, Any]) -> MedusaShape:
        # heads of others name two of the sizes otherwise, and have a head for each block unless they say so
        refuse_others(file, {"original_lm_head": False, **config}, _AS_WRITTEN)
        target = config.get("vocab_size")
        sizes: dict[str, Any] = {
            "hidden": config.get("hidden_size"),
            "vocabulary": config.get("truncated_vocab_size", target),
            "target_vocabulary": target,
            "blocks": config.get("num_heads"),
            "layers": config.get("num_hidden_layers"),
        }
        refuse_no_sizes(file, sizes)
        return MedusaShape(**sizes, states=())


HEAD = _Medusa()
