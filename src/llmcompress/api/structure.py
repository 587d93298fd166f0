"""What changes a model, or comes beside it: what `depth`, `width`, `lora`, `recover` and `draft` do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from llmcompress.api.compression import placed
from llmcompress.api.quiet import quiet_libraries
from llmcompress.api.results import Result, timed
from llmcompress.api.settings import (
    DRAFT_RATE,
    DRAFT_STEPS,
    DRAFT_VOCABULARY,
    STEPS,
    TEXT_SETTINGS,
    WRITTEN,
    DraftKind,
    depth_text,
    refuse_other_kind,
    refuse_unknown,
    text_of,
)
from llmcompress.api.steps import Watch, watched
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.ranks import refuse_several

NOTHING_KEPT = "nothing is kept of an output under way; the same command begins again"
ALL_KEPT = "the same command goes on from here"


def restructured(
    output: Path,
    work: Callable[[Watch], dict[str, Any]],
    progress: Watch | None,
    stop: Callable[[int], bool] | None,
    kept: str = NOTHING_KEPT,
) -> Result:
    """The result of work that writes `output` and returns its report. kept: what a later start finds."""
    with quiet_libraries():
        return timed(output, lambda: work(watched(progress, stop, kept)))


def prune_depth(
    model: str | Path,
    output: str | Path | None = None,
    *,
    drop: int,
    by: Literal["similarity", "kl"] = "similarity",
    keep_first: int = 2,
    keep_last: int = 1,
    contiguous: bool = False,
    options: Options | None = None,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    **settings: Any,
) -> Result:
    """Drop the decoder layers that a model misses least; the result is a plain model with fewer layers.

    drop: how many. by: "similarity": those that change their input least; "kl": one by one, the one without which the
    logits move least. keep_first, keep_last: layers that stay. contiguous: layers that follow one another, judged
    together. settings: `calibration`, `field`, `samples`, `length`, `seed`. Raises LlmcompressError.

        >>> result = llmcompress.prune_depth("model", "model-3", drop=1, samples=2, length=64)
        >>> result.report["depth"]["removed"]
        [2]
    """
    from llmcompress.engine.structure import depth

    refuse_several("prune_depth() of Python")
    refuse_unknown(settings, TEXT_SETTINGS, "the options of depth")
    asked = depth.DepthRequest(drop, by, keep_first, keep_last, contiguous)
    plan = depth.plan_depth(Path(model), asked, depth_text(by, settings), placed(options, output))
    return restructured(plan.opened.out, lambda watch: depth.prune_depth(plan, watch), progress, stop)


def prune_width(
    model: str | Path,
    output: str | Path | None = None,
    *,
    ffn: int | None = None,
    ratio: float | None = None,
    multiple_of: int = 64,
    by: Literal["energy", "cost"] = "energy",
    repair: bool = True,
    options: Options | None = None,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    **settings: Any,
) -> Result:
    """Take channels out of the feed-forward of every layer; the result is a plain model with another width.

    ffn: channels that stay, or ratio: the share that goes. multiple_of: what the width is a multiple of. by: "energy":
    those go that add least to the outputs; "cost": those that the others make up for best. repair: fit the matrix that
    reads the channels to those that stay. settings: `calibration`, `field`, `samples`, `length`, `seed`. Raises
    LlmcompressError.

        >>> result = llmcompress.prune_width("model", "model-narrow", ratio=0.25, samples=2, length=64)
        >>> result.nbytes < result.report["source"]["bytes"]
        True
    """
    from llmcompress.engine.structure import width

    refuse_several("prune_width() of Python")
    refuse_unknown(settings, TEXT_SETTINGS, "the options of width")
    asked = width.WidthRequest(ffn, ratio, multiple_of, by, repair)
    plan = width.plan_width(Path(model), asked, text_of(settings), placed(options, output))
    return restructured(plan.opened.out, lambda watch: width.prune_width(plan, watch), progress, stop)


def repair_lora(
    original: str | Path,
    compressed: str | Path,
    output: str | Path | None = None,
    *,
    rank: int = 32,
    by: Literal["outputs", "weights"] = "outputs",
    options: Options | None = None,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    **settings: Any,
) -> Result:
    """Write a LoRA adapter that gives a compressed model back what low rank can of what it lost.

    rank: of the correction of every matrix. by: brings outputs on text nearest to the original's, or weights. settings:
    `calibration`, `field`, `samples`, `length`, `seed`. Raises LlmcompressError.

        >>> result = llmcompress.repair_lora("model", "model-w4", "adapter", rank=4, samples=2, length=64)
        >>> llmcompress.evaluate("model-w4", "model", adapter="adapter", windows=2, length=64).kl < 1
        True
    """
    from llmcompress.engine.structure.lora import repair
    from llmcompress.engine.structure.lora_plan import plan_lora

    refuse_several("repair_lora() of Python")
    refuse_unknown(settings, TEXT_SETTINGS, "the options of lora")
    plan = plan_lora(Path(original), Path(compressed), rank, by, text_of(settings), placed(options, output))
    return restructured(plan.opened.out, lambda watch: repair(plan, watch), progress, stop)


def recover(
    compressed: str | Path,
    ref: str | Path,
    output: str | Path | None = None,
    *,
    steps: int = STEPS,
    rate: float | None = None,
    weights: Literal["full", "low-rank"] = "low-rank",
    options: Options | None = None,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    **settings: Any,
) -> Result:
    """Train a compressed model's scales, or the weights that pruning left, and gains, towards the original.

    compressed: a directory or a GGUF file; the output is the same. ref: the model it was made from. steps: of
    training. rate: the share by which a step changes a scale at most; by default a hundredth of the mean error of
    the matrices. weights: how those of a pruned, narrower or shallower model are trained, each for itself or by a
    change of low rank. settings: `calibration`, `field`, `samples`, `length`, `seed`. Raises LlmcompressError;
    RunError where the divergence on text that is held back did not fall.

        >>> rounded = llmcompress.compress("model", method="rtn", bits=3, output="model-w3")
        >>> result = llmcompress.recover(rounded.output, "model", "recovered", steps=16, samples=32, length=64)
        >>> held = result.report["recovery"]["held_back"]["calibration"]
        >>> held["kl"] < held["kl_before"]
        True
    """
    from llmcompress.engine.recover import recovery
    from llmcompress.engine.recover.recover_plan import RecoverRequest, plan_recover

    refuse_several("recover() of Python")
    refuse_unknown(settings, TEXT_SETTINGS, "the options of recover")
    request = RecoverRequest(steps, rate, weights)
    plan = plan_recover(Path(compressed), Path(ref), request, text_of(settings), placed(options, output))
    return restructured(plan.opened.out, lambda watch: recovery.recover(plan, watch), progress, stop, ALL_KEPT)


def train_draft(
    model: str | Path,
    output: str | Path | None = None,
    *,
    kind: DraftKind = "eagle3",
    layers: int | None = None,
    steps: int = DRAFT_STEPS,
    vocabulary: int | None = None,
    written: int = WRITTEN,
    rate: float | None = None,
    options: Options | None = None,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    **settings: Any,
) -> Result:
    """Train what drafts tokens for a model, compressed or not: a head, or the model's own first layers.

    kind: "eagle3": EAGLE-3, and "medusa": Medusa, written as vLLM reads heads; "prune": the first `layers` layers with
    the norm and the head of the model, decoded, as a model. steps: of training. vocabulary: how many tokens a head can
    draft, 8192 by default. written: windows that the model writes itself, beside the calibration text. rate: the
    highest of Adam; by default 0.001, and that of `recover` for a pruned draft. settings: `calibration`, `field`,
    `samples`, `length`, `seed`. Raises LlmcompressError; RunError where the loss on text that is held back did not
    fall.

        >>> head = llmcompress.train_draft("model", "draft", steps=16, samples=32, written=0, length=64)
        >>> head.report["format"]
        'eagle3'
    """
    from llmcompress.engine.draft import head_training, pruned
    from llmcompress.engine.draft.draft_plan import DraftRequest, plan_draft

    refuse_several("train_draft() of Python")
    refuse_unknown(settings, TEXT_SETTINGS, "the options of draft")
    refuse_other_kind(kind, layers, vocabulary)
    text, placed_ = text_of(settings), placed(options, output)
    if layers is not None:
        asked = pruned.PrunedDraftRequest(layers, steps, written, rate)
        cut = pruned.plan_pruned_draft(Path(model), asked, text, placed_)
        return restructured(
            cut.opened.out, lambda watch: pruned.train_pruned_draft(cut, watch), progress, stop, ALL_KEPT
        )
    request = DraftRequest(kind, steps, vocabulary or DRAFT_VOCABULARY, written, rate or DRAFT_RATE)
    plan = plan_draft(Path(model), request, text, placed_)
    return restructured(plan.opened.out, lambda watch: head_training.train_draft(plan, watch), progress, stop, ALL_KEPT)
