"""Where a language model lies inside a multimodal model of transformers, and what the parts of both are called."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from llmcompress.arch.spec import ArchSpec, Norm
from llmcompress.errors import CheckpointError
from llmcompress.isolation import probe
from llmcompress.model.disk_names import disk_names, parameters_of
from llmcompress.model.skeleton import skeleton

_SIZE = 1_000_000  # bounds processor time and memory as for so many bytes: building what may be a large model


@dataclass(frozen=True)
class Wrapping:
    """The language model within a multimodal one.

    decoder: module path of the base of the language model, which holds its layers. head: that of the head. linears: by
    on-disk name, the module path of every linear.
    """

    decoder: str
    head: str
    linears: Mapping[str, str]

    def moved(self, spec: ArchSpec, config: Any, names: Collection[str]) -> ArchSpec:
        """The declaration of a language model, its paths those within the multimodal model. names: of tensors."""
        base = spec.layers.partition(".")[0]

        def path(old: str) -> str:
            return self.head if old == spec.head else f"{self.decoder}.{old.removeprefix(f'{base}.')}"

        layers = path(spec.layers)
        found = disk_names(skeleton(config, None), layers, names, {})
        return replace(
            spec,
            layers=layers,
            embed=path(spec.embed),
            head=self.head,
            outside=tuple(map(path, spec.outside)),
            disk={**spec.disk, **found.disk},
            final=None if spec.final is None else _renamed(spec.final, path(spec.final.path)),
            positions=None if spec.positions is None else path(spec.positions),
        )


def wrapping(config: Any, names: Collection[str]) -> Wrapping:
    """How transformers' multimodal model of `config` holds its language model; CheckpointError where it has no such.

    names: of the tensors on disk.
    """

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"a {config.model_type!r} model of this config cannot be built: {reason}")

    probe(lambda: _wrapping(config, names), failed, _SIZE + 1000 * len(names))
    return _wrapping(config, names)


def _wrapping(config: Any, names: Collection[str]) -> Wrapping:
    model: Any = skeleton(config, None, towers=True)
    decoder = model.get_decoder()
    base = getattr(decoder, decoder.base_model_prefix, decoder)  # some hold a causal model with a head of its own
    paths = {id(module): path for path, module in model.named_modules()}
    if id(base) not in paths or id(model.get_output_embeddings()) not in paths:
        raise CheckpointError(f"no language model with a head was found in a {config.model_type!r} model")
    linears = {}
    for parameter, name in parameters_of(model, names).items():
        module = parameter.removesuffix(".weight")
        if module != parameter and isinstance(model.get_submodule(module), nn.Linear):
            linears[name.removesuffix(".weight")] = module
    return Wrapping(paths[id(base)], paths[id(model.get_output_embeddings())], linears)


def _renamed(norm: Norm, path: str) -> Norm:
    return replace(norm, path=path)
