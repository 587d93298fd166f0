"""The sites of a model of an undeclared family, proven for one layer of each kind in a process with limits."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from llmcompress.arch.scaling_site import Index, Site, SitePart
from llmcompress.arch.spec import ArchSpec
from llmcompress.errors import CheckpointError
from llmcompress.isolation import Limit, isolated
from llmcompress.model.rehearsal import LENGTH
from llmcompress.model.site_proof import SiteProof
from llmcompress.model.skeleton import UNUSABLE, first_line
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.model.traced_layer import RandomWeights, TracedLayer, Widened

_SIZE = 5_000_000  # bounds processor time and memory as for so many bytes
_HINT = "leave the step that scales channels out"
_COUNTED = re.compile(r"(layer|block)?_?(idx|id|number|index)")  # settings that only number a layer


@dataclass(frozen=True)
class ProvenSites:
    """By number of every layer its sites, and why matrices have none by module path, `{e}` standing for an expert."""

    sites: dict[int, tuple[Site, ...]]
    refused: dict[int, dict[str, str]]


def prove_sites(config: Any, names: Collection[str], spec: ArchSpec, trust_remote_code: bool = False) -> ProvenSites:
    """The sites of all layers of transformers' `config`. CheckpointError where layers cannot be run on random weights.

    names: of the tensors on disk. spec: as observed.
    """
    if trust_remote_code:  # which may do all that we may do
        return _unpacked(_proven(config, spec, True))

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"where a {spec.name!r} model can be scaled could not be proven: {reason}", _HINT)

    def work(limit: Limit) -> Iterator[bytes]:
        limit(_SIZE + 1000 * len(names))
        yield json.dumps(_proven(config, spec, False)).encode()

    return _unpacked(json.loads(b"".join(isolated(work, failed))))


def _proven(config: Any, spec: ArchSpec, trust_remote_code: bool) -> list[Any]:
    """The proof as plain data: for every kind of layers their numbers, their sites, and what has none."""
    weights = RandomWeights()
    plain = replace(spec, disk={}, joined={})
    kinds = []
    try:
        with Widened():
            model = StreamedModel(weights, config, plain, dtype=torch.float64, trust_remote_code=trust_remote_code)
            weights.shapes.update(_shapes(model))
            hidden = model.embed(torch.arange(LENGTH)[None] + 3)
        for numbers in _kinds(model.layers, spec):
            entering = model.random_rows(hidden, torch.Generator().manual_seed(0))
            with model.layer(numbers[0]) as layer:
                proof = SiteProof(TracedLayer(model, numbers[0], layer, entering), spec)
            kinds.append([numbers, [_packed(site) for site in proof.sites], proof.refused])
    except UNUSABLE as error:
        raise CheckpointError(
            f"the layers of a {spec.name!r} model could not be run on random weights: {first_line(error)}", _HINT
        ) from None
    return kinds


def _packed(site: Site) -> list[Any]:
    parts = [
        [part.path, part.inputs, part.divided, *map(_numbers, (part.at, part.spread)), part.offset]
        for part in site.parts
    ]
    return [site.space, site.channels, parts, site.norm]


def _numbers(index: Index | None) -> list[int] | None:
    return None if index is None else index.tolist()


def _index(numbers: list[int] | None) -> Index | None:
    return None if numbers is None else np.array(numbers)


def _unpacked(kinds: list[Any]) -> ProvenSites:
    proven = ProvenSites({}, {})
    for numbers, packed, refused in kinds:
        sites = []
        for space, channels, parts, norm in packed:
            writer, *readers = (
                SitePart(path, inputs, divided, _index(at), _index(spread), offset)
                for path, inputs, divided, at, spread, offset in parts
            )
            sites.append(Site(space, channels, writer, tuple(readers), norm=norm))
        proven.sites.update(dict.fromkeys(numbers, tuple(sites)))
        proven.refused.update(dict.fromkeys(numbers, refused))
    return proven


def _shapes(model: StreamedModel) -> Iterator[tuple[str, torch.Size]]:
    prefix = model.spec.layers
    for name, value in model.causal.named_parameters(remove_duplicate=False):
        yield name, value.shape
    for number, layer in enumerate(model.layers):
        for path, value in layer.named_parameters(remove_duplicate=False):
            yield f"{prefix}.{number}.{path}", value.shape


def _kinds(layers: list[nn.Module], spec: ArchSpec) -> list[list[int]]:
    """Numbers of layers that have equal modules, shapes and settings, and run the same matrices."""
    kinds: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        facts = [
            (path, type(module).__qualname__, sorted((k, v) for k, v in vars(module).items() if _is_setting(k, v)))
            for path, module in layer.named_modules()
        ]
        shapes = [(path, tuple(value.shape)) for path, value in layer.named_parameters()]
        kinds.setdefault(repr((facts, shapes, sorted(spec.idle.get(number, ())))), []).append(number)
    return list(kinds.values())


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and not _COUNTED.fullmatch(name)
