"""Transforms on headers: the order of a recipe's steps is checked, and changed tensors get their new descriptions."""

from dataclasses import replace

from llmcompress.arch.spec import RESIDUAL
from llmcompress.engine.source.further_layers import FurtherLayers
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.errors import PlanError
from llmcompress.formats.base import TensorSpec
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import Recipe
from llmcompress.solve.hadamard import largest_order
from llmcompress.store.headers import ModelHeaders, Stored
from llmcompress.transforms.base import Scaling, Transform
from llmcompress.transforms.rotate import Rotate
from llmcompress.transforms.smoothattention import SmoothAttention

_RANKS: tuple[type, ...] = (Transform, Pruner, Method)
_AFTER = ("which has changed the weights for good by then", "which has rounded the weights by then")
_DOES = ("", "prunes", "rounds")


def check_order(recipe: Recipe) -> None:
    """PlanError for steps that do not stand in the order transforms, one that prunes, one that rounds."""
    ranks = [_RANKS.index(_kind(step)) for step in recipe.steps]
    for number, (step, rank) in enumerate(zip(recipe.steps, ranks, strict=True)):
        place = f"step {number + 1}, {step.name},"
        if number and rank < ranks[number - 1]:
            before = recipe.steps[number - 1].name
            raise PlanError(f"{place} comes after {before}, {_AFTER[rank]}", f"put {step.name} before {before}")
        if number and rank and rank == ranks[number - 1]:
            raise PlanError(f"{place} is the second one that {_DOES[rank]}", "use set: for exceptions")
        if isinstance(step, Rotate) and number and not isinstance(recipe.steps[number - 1], Rotate):
            before = recipe.steps[number - 1].name
            raise PlanError(f"{place} comes after {before}, whose channels it would turn", f"put it before {before}")
        _check_method(step, place, recipe.method)


def _check_method(step: Transform | Pruner | Method, place: str, method: Method | None) -> None:
    """PlanError for a step that needs a certain step to round after it. place: of the step, for a message."""
    if isinstance(step, Pruner) and step.within is not None and not (method and method.compensates):
        raise PlanError(
            f"{place} is to choose within a step that makes up for errors, and none follows",
            "add the step gptq after it, or leave joint out",
        )
    if isinstance(step, Scaling) and method is None:
        raise PlanError(
            f"{step.name} makes weights fit for rounding, and no step rounds them", "add one, such as rtn, after it"
        )


def _kind(step: Transform | Pruner | Method) -> type:
    return next(kind for kind in _RANKS if isinstance(step, kind))


def transformed_headers(headers: ModelHeaders, recipe: Recipe, anatomy: Anatomy, ledger: Ledger) -> ModelHeaders:
    """The headers of the transformed model, in which a rotated model has a head of its own, no longer tied.

    PlanError for an architecture whose function a transform would change.
    """
    for step in recipe.transforms:
        if anatomy.spec.observed and not isinstance(step, Scaling):
            raise PlanError(
                f"{step.name} needs a declaration of the architecture, {headers.config['model_type']!r} has none",
                "leave the step out; `llmcompress list archs` shows which are declared",
            )
        if isinstance(step, SmoothAttention) and anatomy.spec.scores is None:
            raise PlanError(
                f"keys of a {headers.config['model_type']!r} model cannot be scaled against queries: "
                "its declaration does not say where they are",
                "leave smoothattention out",
            )
        if isinstance(step, Rotate) and step.residual and headers.wrapper is not None:
            raise PlanError(
                f"the hidden states of a {headers.wrapper['model_type']!r} model cannot be rotated: "
                "what its other parts make of images comes in among them",
                "use rotate with residual: false, which turns values alone",
            )
        if isinstance(step, Rotate) and step.residual and (name := FurtherLayers(anatomy).first()) is not None:
            raise PlanError(
                f"the hidden states of this model cannot be rotated: {name}, of a layer after the last, reads them too",
                "use rotate with residual: false, which turns values alone",
            )
        if isinstance(step, Rotate) and step.residual:
            headers = _untied(headers, anatomy, ledger)
    return headers


def _untied(headers: ModelHeaders, anatomy: Anatomy, ledger: Ledger) -> ModelHeaders:
    spec, kind = anatomy.spec, headers.config["model_type"]
    if any(RESIDUAL in norm.feeds for norm in spec.norms):
        raise PlanError(
            f"the hidden states of a {kind!r} model cannot be rotated: norms stand between its matrices and them",
            "use rotate with residual: false, which turns values alone",
        )
    if spec.final is None or any(norm.centred for norm in (*spec.norms, spec.final)):
        raise PlanError(
            f"the hidden states of a {kind!r} model cannot be rotated: its norms subtract the mean",
            "use rotate with residual: false, which turns values alone",
        )
    embedding, head = anatomy.outer(spec.embed), anatomy.outer(spec.head)
    if embedding is None or anatomy.outer(spec.final.path) is None:
        raise PlanError(f"{headers.place} has no tensor {spec.embed}.weight or {spec.final.path}.weight to rotate")
    stored = headers.tensors[embedding]
    width = stored.spec.shape[1]
    if largest_order(width) < width:
        ledger.note(
            "rotation", "hidden states", f"turned in blocks of {largest_order(width)}: no Hadamard matrix of {width}"
        )
    tensors = dict(headers.tensors)
    if head is None:
        name = f"{spec.disk_path(spec.head)}.weight"
        tensors[name] = Stored(TensorSpec(name, stored.spec.dtype, stored.spec.shape), stored.file, 0, 0)
        ledger.note("rotation", name, f"no longer the embedding: {tensors[name].spec.nbytes:,} bytes more")
    return replace(headers, tensors=tensors, config={**headers.config, "tie_word_embeddings": False})
