"""The matrices of a checkpoint, found from headers alone, by the declaration of its family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompress.arch import find
from llmcompress.arch.spec import LAYER_COUNTS, ArchSpec, further_layers
from llmcompress.engine.source.header_checks import (
    check_hyperparameters,
    check_names,
    check_numbers,
    check_shapes,
    numbered,
)
from llmcompress.engine.source.tensor_names import Anatomy, MatrixRef
from llmcompress.errors import CheckpointError
from llmcompress.formats.base import FLOAT_TYPES
from llmcompress.ledger import Ledger
from llmcompress.store.headers import ModelHeaders


@dataclass(frozen=True)
class Matrices:
    """Every declared matrix, in order of execution. widths: number of inputs (in_features) by on-disk module.

    prefix: on-disk name of the list of layers; empty for GGUF files, which have names of their own. layers: number of
    layers, without those that predict further tokens; 0 for GGUF files. linears: by on-disk module of a multimodal
    model, the path in transformers of every linear, in its language model or not. outside: by on-disk module, the last
    of `refs`, what is to be rounded outside of the layers: head, embedding, further (of a layer that predicts further
    tokens).
    """

    spec: ArchSpec
    refs: list[MatrixRef]
    widths: dict[str, int]
    prefix: str = ""
    layers: int = 0
    linears: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)

    def anatomy(self, headers: ModelHeaders) -> Anatomy:
        """The headers of the model, read with what is known of the matrices."""
        return Anatomy(headers, self.spec, self.prefix, self.layers)


def matrices_of(headers: ModelHeaders, trust_remote_code: bool, ledger: Ledger) -> Matrices:
    """The matrices of an original model. CheckpointError unless config.json and weights fit and can be worked on."""
    _check_source(headers, trust_remote_code)
    check_numbers(headers)
    check_hyperparameters(headers)
    spec, linears = described(headers, trust_remote_code, ledger)
    prefix, count = _layer_prefix(headers, spec)
    refs = _matrix_refs(headers, spec, prefix, count)
    widths = {ref.module: shape_of(headers, ref)[1] for ref in refs}
    check_shapes(headers, spec, refs)
    return Matrices(spec, refs, widths, prefix, count, linears)


def _check_source(headers: ModelHeaders, trust_remote_code: bool) -> None:
    if "quantization_config" in headers.config:
        method = headers.config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else "unknown"
        raise CheckpointError(f"{headers.path} is already quantised ({name})", "start from the original model")
    if "auto_map" in headers.config and not trust_remote_code:
        raise CheckpointError(
            f"{headers.path} brings its own code (auto_map in config.json)", "pass --trust-remote-code if you trust it"
        )
    if "model_type" not in headers.config:
        raise CheckpointError(
            f"{headers.path / 'config.json'} has no model_type", "give a directory as transformers saves it"
        )


def described(headers: ModelHeaders, trust_remote_code: bool, ledger: Ledger) -> tuple[ArchSpec, Mapping[str, str]]:
    """The declaration of a model, or what is observed of it; and `Matrices.linears`."""
    model_type = str(headers.config["model_type"])
    spec: ArchSpec | None = find(model_type)
    if spec is not None and headers.wrapper is None:
        return spec, {}
    from llmcompress.engine.source.open import config_of
    from llmcompress.model.observe import observe

    config, names = config_of(headers, trust_remote_code), headers.tensors
    linears: Mapping[str, str] = {}
    if headers.wrapper is not None:
        from llmcompress.model.wrapped import wrapping

        found = wrapping(config, names)
        linears = found.linears
        if spec is not None and spec.experts is None:
            return found.moved(spec, config, names), linears
    observed = observe(config, names, trust_remote_code)
    ledger.note("architecture", model_type, "no declaration: the order of its matrices was observed in a dry run")
    return observed, linears


def _matrix_refs(headers: ModelHeaders, spec: ArchSpec, prefix: str, count: int) -> list[MatrixRef]:
    """Every declared matrix, in order of execution."""
    experts = spec.expert_count(headers.config)
    check_names(headers, spec, prefix, count)
    refs: list[MatrixRef] = []
    for layer in range(count):
        before = len(refs)
        for linear in spec.linears:
            if linear.path in spec.idle.get(layer, ()):
                continue
            for expert, path, space in spec.expand(linear, experts):
                module = f"{prefix}.{layer}.{spec.disk_path(path)}"
                if f"{module}.weight" in headers.tensors:
                    refs.append(MatrixRef(module, layer, expert, path, space, linear))
                elif spec.experts is None and not spec.observed:
                    raise CheckpointError(
                        f"tensor {module}.weight is missing from {headers.place}", "the config does not fit the weights"
                    )
        if len(refs) == before:
            raise CheckpointError(f"{headers.place} has no matrices of layer {layer} ({prefix}.{layer})")
    return refs


def _layer_prefix(headers: ModelHeaders, spec: ArchSpec) -> tuple[str, int]:
    """The on-disk prefix of the layers, and their number. Some checkpoints lack the name of the base model."""
    whole = spec.disk_path(spec.layers)
    short = whole.partition(".")[2]
    for prefix in (whole, short):
        pattern = numbered(prefix)
        numbers = {int(found[1]) for name in headers.tensors if prefix and (found := pattern.match(name))}
        if numbers:
            if max(numbers) >= len(headers.tensors):
                raise CheckpointError(f"{headers.place} has no matrices of most layers below {prefix}.{max(numbers)}")
            return prefix, _without_further(headers.config, max(numbers) + 1)
    raise CheckpointError(f"{headers.place} has no tensors under {whole}", "the config does not fit the weights")


def _without_further(config: Mapping[str, Any], count: int) -> int:
    """How many of so many numbered layers come before those that predict further tokens."""
    stated = next((config[key] for key in LAYER_COUNTS if isinstance(config.get(key), int)), count)
    return stated if stated < count <= stated + further_layers(config) else count


def shape_of(headers: ModelHeaders, ref: MatrixRef) -> tuple[int, int]:
    """Rows (outputs) and columns (inputs) of a matrix; CheckpointError unless it holds floating-point values."""
    spec = headers.tensors[f"{ref.module}.weight"].spec
    if len(spec.shape) != 2 or spec.dtype not in FLOAT_TYPES:
        raise CheckpointError(f"tensor {spec.name} is {spec.dtype} {list(spec.shape)}, not a floating-point matrix")
    if 0 in spec.shape:
        raise CheckpointError(f"tensor {spec.name} is {list(spec.shape)}, which holds nothing")
    rows, columns = spec.shape
    return (columns, rows) if ref.linear.conv1d else (rows, columns)
