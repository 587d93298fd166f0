"""The output head as a matrix to be rounded, where a step asks for it: it is worked on after all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcompress.arch.spec import Linear
from llmcompress.engine.source.matrix_refs import Matrices
from llmcompress.engine.source.tensor_names import Anatomy, MatrixRef
from llmcompress.errors import PlanError
from llmcompress.formats.base import FLOAT_TYPES, Format
from llmcompress.methods.base import Method
from llmcompress.methods.gptq import Gptq


def head_bits(step: Method | None) -> int | None:
    """The bits that a step asks for the head; None where it leaves the head as it is."""
    return step.head_bits if isinstance(step, Gptq) else None


def with_head(matrices: Matrices, anatomy: Anatomy, step: Method | None, format_: Format) -> Matrices:
    """The matrices with the head behind them where `step` rounds it; PlanError for a head that cannot be rounded."""
    if head_bits(step) is None:
        return matrices
    if not format_.head_codes:
        raise PlanError(
            f"loaders of format {format_.name} read no head that --head-bits has rounded",
            "use --output-type" if format_.name == "gguf" else "use --format compressed-tensors, gptq or mlx",
        )
    headers, path = anatomy.headers, anatomy.spec.head
    name = anatomy.outer(path)
    if name is None or headers.config.get("tie_word_embeddings") or headers.whole_config.get("tie_word_embeddings"):
        raise PlanError(
            f"the head of {headers.place} is its embedding, of which loaders of {format_.name} read no codes",
            "leave --head-bits out, or write a GGUF file, which has a type for it",
        )
    stored = headers.tensors[name].spec
    if len(stored.shape) != 2 or stored.dtype not in FLOAT_TYPES:
        raise PlanError(f"{name} is {stored.dtype} {list(stored.shape)}, not a floating-point matrix")
    module = name.removesuffix(".weight")
    ref = MatrixRef(module, matrices.layers, None, path, "head", Linear(path, "head"))
    return replace(
        matrices, refs=[*matrices.refs, ref], widths={**matrices.widths, module: stored.shape[1]}, head=module
    )


def with_head_options(step: Method, head: str) -> Method:
    """The step with the head's own options after those of all patterns. head: its module, empty where it stays."""
    if not head:
        return step
    own: Mapping[str, Any] = {"bits": head_bits(step), "activations": "none", "skip": False}
    others = {pattern: options for pattern, options in step.set.items() if pattern != head}
    return step.model_copy(update={"set": {**others, head: {**step.set.get(head, {}), **own}}})
