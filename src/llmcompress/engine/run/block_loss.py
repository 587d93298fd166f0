"""What scaling channels costs: how far the output of the block that reads them moves once weights are rounded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llmcompress.arch.scaling_site import Site
from llmcompress.engine.run.forward import Stream
from llmcompress.grids.nearest import nearest
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.transforms.base import Reader
from llmcompress.workers import Workers

_WINDOWS = 4  # run through the blocks for every scale

Call = tuple[tuple[Any, ...], dict[str, Any], Tensor]


class BlockLoss:
    """Runs single blocks of a layer, attention or feed-forward, on a few windows with scaled and rounded weights."""

    def __init__(self, model: StreamedModel, number: int, stream: Stream, sites: list[Site], workers: Workers) -> None:
        self.layer, self.workers = stream.layer, workers
        self.calls: dict[str, Call] = {}
        handles = [
            self.layer.get_submodule(path).register_forward_hook(self._keep(path), with_kwargs=True)
            for path in {block_of(site) for site in sites if site.norm}
        ]
        try:
            with torch.no_grad():
                count = min(_WINDOWS, stream.hidden.shape[0])
                model.call(number, self.layer, stream.hidden.read(slice(0, count)).to(model.device))
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            self.calls[path] = args, kwargs, _first(out).clone()

        return hook

    @torch.no_grad()
    def __call__(self, site: Site, readers: Mapping[str, Reader], scale: Tensor) -> float:
        """Mean squared error of a block's output when its readers are scaled, rounded, and scaled back.

        readers: by module path. scale: of each input channel [in].
        """
        args, kwargs, expected = self.calls[block_of(site)]
        before = {}
        try:
            for path, reader in readers.items():
                if reader.grid is not None:
                    owner = self.layer.get_submodule(path)
                    weight: Any = owner.weight
                    before[path] = weight.data
                    value = nearest(reader.weight * scale, reader.grid, self.workers) / scale
                    weight.data = (value.T if isinstance(owner, Conv1D) else value).to(weight.dtype)
            found = _first(self.layer.get_submodule(block_of(site))(*args, **kwargs))
        finally:
            for path, data in before.items():
                self.layer.get_submodule(path).weight.data = data
        return float((found.float() - expected.float()).square().mean())


def block_of(site: Site) -> str:
    """The module that all readers of a site belong to."""
    paths = [part.path.split(".") for part in site.readers]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return ".".join(paths[0][:shared])


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found
