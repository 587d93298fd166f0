"""Whether the tensors of a checkpoint are those of transformers' model, found before any of them is read.

The model is run once on weights that are all zero, named and shaped as the headers say: what is missing on disk, has
another shape, or cannot be run, shows within a second instead of in the middle of a run.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llmcompress.arch.spec import ArchSpec
from llmcompress.errors import CheckpointError
from llmcompress.isolation import probe
from llmcompress.model.streamed_model import StreamedModel

LENGTH = 7  # tokens; a top-k over positions must not look like one over experts
_WHOLE_CHUNK = 71  # tokens; families that go through a text in chunks compute the rest of it otherwise


class Zeros:
    """Weights of the right shapes that are all zero and take no memory: one number, repeated.

    rising: a table, with or without the prefix of a base model, whose rows differ instead, so that tokens do.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, rising: str | None = None
    ) -> None:
        self._shapes, self._rising = shapes, rising
        self._zero = torch.zeros((), dtype=dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if f".{self._rising}".endswith(f".{name}"):
            return (torch.arange(shape[0]) % 100).to(self._zero.dtype)[:, None].expand(shape)
        return self._zero.expand(shape)


class ZeroProducts(TorchFunctionMode):
    """A context in which the product with a matrix of zeros is not computed: a library would copy the whole matrix."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear and len(args) > 1 and args[1].shape[1:] == args[0].shape[-1:]:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        return func(*args, **(kwargs or {}))


def rehearse(
    shapes: Mapping[str, tuple[int, ...]],
    config: Any,
    spec: ArchSpec,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    tiled_attention: bool = False,
) -> None:
    """CheckpointError unless a model of `config` finds all its parameters among `shapes`, by on-disk name, and runs.

    dtype: the type its layers run in. A layer that runs in float32 alone is refused with that as the way out.
    """
    size = 500 * len(shapes) + max(map(math.prod, shapes.values()), default=0) // 50

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(
            f"a {spec.name!r} model of this config cannot be run: {reason}",
            "give a config.json and weights as transformers saves them",
        )

    def attempt(dtype: torch.dtype) -> None:
        probe(lambda: _run(shapes, config, spec, dtype, trust_remote_code, tiled_attention), failed, size)

    try:
        attempt(dtype)
    except CheckpointError as error:
        if dtype == torch.float32:
            raise
        attempt(torch.float32)  # which says what is wrong where the type is not
        name = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"in {name}, {error.message}", "use --compute-dtype float32") from None


def _run(
    shapes: Mapping[str, tuple[int, ...]],
    config: Any,
    spec: ArchSpec,
    dtype: torch.dtype,
    trust_remote_code: bool,
    tiled_attention: bool,
) -> None:
    model = StreamedModel(
        Zeros(shapes, dtype, spec.disk_parameter(f"{spec.embed}.weight")),
        config,
        spec,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        tiled_attention=tiled_attention,
    )
    with ZeroProducts(), torch.no_grad():
        # two: batches are called otherwise than one
        hidden = model.embed((torch.arange(_WHOLE_CHUNK) % 2).expand(2, -1))
        with model.outer(embed=True, head=True):
            pass
        different = set(distinct(model.layers))
        for number in range(len(model.layers)):
            with model.layer(number) as layer:
                if number in different:
                    model.call(number, layer, hidden.clone())


def distinct(layers: list[nn.Module]) -> Iterator[int]:
    """Numbers of the layers that are not built like an earlier layer."""
    known = set()
    for number, layer in enumerate(layers):
        kinds = tuple((path, type(module).__name__) for path, module in layer.named_modules())
        shapes = tuple((path, parameter.shape) for path, parameter in layer.named_parameters())
        if (kinds, shapes) not in known:
            known.add((kinds, shapes))
            yield number
