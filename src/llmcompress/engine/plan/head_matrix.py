"""Matrices that are rounded after all layers where a step asks for it: head, embedding, layers after the last."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from llmcompress.arch.spec import Linear
from llmcompress.engine.plan.matrix_options import matches
from llmcompress.engine.source.further_layers import FurtherLayers
from llmcompress.engine.source.matrix_refs import Matrices, shape_of
from llmcompress.engine.source.tensor_names import Anatomy, MatrixRef
from llmcompress.errors import PlanError
from llmcompress.formats.base import FLOAT_TYPES, Format, TensorSpec
from llmcompress.methods.base import Method
from llmcompress.methods.gptq import Gptq
from llmcompress.methods.rtn import Rtn
from llmcompress.store.headers import ModelHeaders

FURTHER = "further"  # what a matrix is that lies in a layer after the last
_HEAD, _EMBEDDING = "head", "embedding"  # the spaces that they read
_AS_IT_IS = "leave it as it is: no --head-bits, no --embedding-bits"


def outside_bits(step: Method | None) -> dict[str, int]:
    """The bits that a step asks for outside of the layers, by what is asked for: head, embedding."""
    asked = {_HEAD: step.head_bits, _EMBEDDING: step.embedding_bits} if isinstance(step, Gptq) else {}
    return {what: bits for what, bits in asked.items() if bits is not None}


def outside_modules(anatomy: Anatomy) -> dict[str, str]:
    """What can be rounded outside of the layers of a model, as `Matrices.outside` has it."""
    names, tied = _outer(anatomy)
    whats = {_HEAD: _HEAD, _EMBEDDING: _HEAD if tied else _EMBEDDING}
    ends = {name.removesuffix(".weight"): whats[what] for what, name in names.items() if name is not None}
    return {**ends, **{module: FURTHER for module, *_ in FurtherLayers(anatomy).matrices()}}


def coded_ends(anatomy: Anatomy, format_: Format) -> list[str]:
    """Head and embedding, by on-disk module, of which loaders of a format read codes.

    None of either where a head is stored that config.json ties to the embedding.
    """
    names, tied = _outer(anatomy)
    if tied and names[_HEAD] is not None:
        return []
    read = {_HEAD: format_.head_codes, _EMBEDDING: format_.embedding_codes}
    stored = [name for what, name in names.items() if name is not None and read[what]]
    return [name.removesuffix(".weight") for name in stored if _is_matrix(anatomy.headers.tensors[name].spec)]


def _is_matrix(stored: TensorSpec) -> bool:
    return len(stored.shape) == 2 and stored.dtype in FLOAT_TYPES


def _outer(anatomy: Anatomy) -> tuple[dict[str, str | None], bool]:
    """On-disk tensors of head and embedding by what they are, None for one that is missing; whether both are one."""
    spec, headers = anatomy.spec, anatomy.headers
    names = {_HEAD: anatomy.outer(spec.head), _EMBEDDING: anatomy.outer(spec.embed)}
    tied = names[_HEAD] is None or bool(
        headers.config.get("tie_word_embeddings") or headers.whole_config.get("tie_word_embeddings")
    )
    return names, tied


def with_outside(matrices: Matrices, anatomy: Anatomy, step: Method | None, format_: Format) -> Matrices:
    """The matrices with others behind them that `step` rounds; PlanError for what cannot be rounded.

    A head that is the embedding is one matrix, under the name of the embedding. Head and embedding are asked for by
    bits of their own, or by an entry of `set` under their whole name that says not to skip them; of layers after the
    last it is those that a pattern of `set` says not to skip.
    """
    matrices = _with_further(matrices, anatomy, step)
    spec, headers = anatomy.spec, anatomy.headers
    names, tied = _outer(anatomy)
    entries = {f"{pattern}.weight": options for pattern, options in (step.set if step else {}).items()}
    named = [what for what, name in names.items() if entries.get(name or "", {}).get("skip") is False]
    asked = dict.fromkeys([*outside_bits(step), *(_HEAD if tied else what for what in named)])
    if not asked:
        return matrices
    _check_asked(asked, tied, format_)
    if tied and None not in names.values():
        raise PlanError(f"{headers.place} has a head of its own, which config.json ties to the embedding", _AS_IT_IS)
    for what in asked:
        path = spec.embed if tied or what == _EMBEDDING else spec.head
        name = names[_EMBEDDING if tied else what]
        if name is None:
            raise PlanError(f"{headers.place} has no tensor of its {what} to be rounded", _AS_IT_IS)
        stored = headers.tensors[name].spec
        if not _is_matrix(stored):
            raise PlanError(f"{name} is {stored.dtype} {list(stored.shape)}, not a floating-point matrix", _AS_IT_IS)
        module = name.removesuffix(".weight")
        reached = spec.embed if what == _EMBEDDING else spec.head
        ref = MatrixRef(module, matrices.layers, None, reached, what, Linear(path, what))
        matrices = replace(
            matrices,
            refs=[*matrices.refs, ref],
            widths={**matrices.widths, module: stored.shape[1]},
            outside={**matrices.outside, module: what},
        )
    return matrices


def _with_further(matrices: Matrices, anatomy: Anatomy, step: Method | None) -> Matrices:
    """The matrices with those of layers after the last that patterns of a step ask for."""
    wanted = [pattern for pattern, options in (step.set if step else {}).items() if options.get("skip") is False]
    if not wanted:
        return matrices
    refs = [
        MatrixRef(module, matrices.layers, None, module, space, linear)
        for module, linear, space in FurtherLayers(anatomy).matrices()
        if any(matches(pattern, module) for pattern in wanted)
    ]
    return replace(
        matrices,
        refs=[*matrices.refs, *refs],
        widths={**matrices.widths, **{ref.module: shape_of(anatomy.headers, ref)[1] for ref in refs}},
        outside={**matrices.outside, **{ref.module: FURTHER for ref in refs}},
    )


def _check_asked(asked: Collection[str], tied: bool, format_: Format) -> None:
    """PlanError for what the loaders of a format do not read, and for an embedding that is asked for as another."""
    typed = format_.name == "gguf"
    if _EMBEDDING in asked and tied:
        raise PlanError(
            "the embedding of this model is its head too", "use --head-bits alone, which rounds both as one"
        )
    if (tied or _EMBEDDING in asked) and not format_.embedding_codes:
        what = "the embedding" if _EMBEDDING in asked else "the head, which is the embedding,"
        raise PlanError(
            f"loaders of format {format_.name} read no codes of {what} of this model",
            "use --embedding-type" if typed else "use --format mlx or dense, or a GGUF file; or leave it as it is",
        )
    if _HEAD in asked and not format_.head_codes:
        raise PlanError(
            f"loaders of format {format_.name} read no codes of a head",
            "use --output-type" if typed else "use --format compressed-tensors, gptq, mlx or dense",
        )


def with_outside_options(step: Method, matrices: Matrices, headers: ModelHeaders) -> Method:
    """The step with the own options of head and embedding after those of all patterns.

    Entries that skip what lies outside of the layers are left out: nothing is done to it without an entry.
    """
    skipping = [pattern for pattern, options in step.set.items() if options.get("skip") is True]
    if skipping:
        there = outside_modules(matrices.anatomy(headers))
        kept = {name: options for name, options in step.set.items() if name not in there or name not in skipping}
        step = step.model_copy(update={"set": kept})
    bits = outside_bits(step)
    for module, what in matrices.outside.items():
        if what == FURTHER:
            continue
        given, wide = step.set.get(module, {}), {"bits": bits[what]} if what in bits else {}
        only = step.grid_type.widths
        if wide and only is not None and bits[what] not in only and "type" not in given:
            raise PlanError(
                f"type {step.type} has {' or '.join(map(str, only))} bits, and --{what}-bits asks for {bits[what]}",
                f"give the {what} a type of its own: --set '{module}: {{type: int, group_size: 64}}'",
            )
        own: Mapping[str, Any] = {**wide, "activations": "none", "skip": False}
        others = {pattern: options for pattern, options in step.set.items() if pattern != module}
        step = step.model_copy(update={"set": {**others, module: {**given, **own}}})
    return step


def outside_method(method: Method, module: str, what: str) -> Method:
    """What rounds a matrix outside of the layers: its values are just rounded where nothing is known of its inputs.

    what: of `Matrices.outside`. PlanError for inputs that would have to be measured.
    """
    if what == _HEAD or not method.needs:
        return method
    options = {name: value for name, value in method.model_dump().items() if name in Rtn.model_fields}
    rounded = Rtn.model_validate({**options, "clip": "search" if method.clip == "output" else method.clip})
    if rounded.needs_calibration:
        raise PlanError(
            f"no text runs through {module}, and {method.activations} inputs would have to be measured",
            "leave it as it is, or give it others: --set 'PATTERN: {skip: false, activations: none}'",
        )
    return rounded
