"""Layers after the last, which predict further tokens (multi-token prediction): engines run them as drafts.

transformers' models leave them out, so no text runs through them: they are copied, or rounded to nearest on request.
Published names are those of layers with higher numbers (DeepSeek-V3, GLM-4.5) or lie below `mtp` (Qwen3-Next).
"""

import re
from collections.abc import Iterator

from llmcompress.arch.spec import Linear
from llmcompress.engine.source.header_checks import numbered
from llmcompress.engine.source.tensor_names import Anatomy

_BELOW_MTP = re.compile(r"(?:^|\.)mtp(?:_[a-z_]+)?\.(?:(?:layers\.)?[0-9]{1,9}\.)?")


class FurtherLayers:
    """The layers after the last of a model."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy, self._numbered = anatomy, numbered(anatomy.prefix)

    def __contains__(self, name: str) -> bool:
        """Whether a tensor lies in one of them."""
        return self._below(name) is not None

    def first(self) -> str | None:
        """The first of their tensors; None of a model without such layers."""
        return next((name for name in self._anatomy.headers.tensors if name in self), None)

    def matrices(self) -> Iterator[tuple[str, Linear, str]]:
        """Module on disk, declaration, and input that it reads, of each matrix that the layers before have too."""
        spec, headers = self._anatomy.spec, self._anatomy.headers
        known = {
            f"{spec.disk_path(path)}.weight": (linear, space)
            for linear in spec.linears
            for _, path, space in spec.expand(linear, spec.expert_count(headers.config))
        }
        for name in headers.tensors:
            below = self._below(name)
            if below is not None and below in known:
                linear, space = known[below]
                yield name.removesuffix(".weight"), linear, f"{name.removesuffix(below)}{space}"

    def _below(self, name: str) -> str | None:
        """The part of the name of a tensor below such a layer; None for a tensor that is in none of them."""
        if found := self._numbered.match(name):
            return name[found.end() :] if int(found[1]) >= self._anatomy.layers else None
        found = _BELOW_MTP.search(name)
        return name[found.end() :] if found else None
