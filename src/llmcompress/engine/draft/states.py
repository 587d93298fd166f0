"""What a head learns from: windows of text, and the target's hidden states for them, kept in the work directory."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from llmcompress.engine.draft.draft_plan import DraftPlan
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.recover.own_text import own_text
from llmcompress.engine.run.forward import Forward, Stream
from llmcompress.engine.run.opened_model import opened_model
from llmcompress.engine.source.open import round_as_stored
from llmcompress.engine.train.training import TrainingText, held_apart
from llmcompress.errors import PlanError
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.staging import Staging
from llmcompress.store.windows import Windows, write_windows
from llmcompress.workers import Workers


def target_model(plan: DraftPlan) -> StreamedModel:
    """The target as it will be served: decoded, inputs rounded as its checkpoint says."""
    opened = plan.opened
    checkpoint = opened.checkpoint
    model = opened_model(
        checkpoint, opened.matrices.spec, opened.resources.dtype, opened.options, tiled_attention=False
    )
    round_as_stored(model, checkpoint)
    return model


def training_text(plan: DraftPlan, given: Tensor, staged: Staging) -> TrainingText:
    """The calibration windows `given`, and those that the target writes; of each, one in ONE_OF is held back."""
    parts, opened = {"calibration": given}, plan.opened
    if plan.request.written:
        text = opened.text.model_copy(update={"samples": plan.request.written})
        trusted = opened.options.trust_remote_code
        parts["written"] = own_text(opened.headers, text, trusted, lambda: target_model(plan), staged)
    return held_apart(parts)


def target_states(
    plan: DraftPlan,
    model: StreamedModel,
    tokens: Tensor,
    staged: Staging,
    workers: Workers,
    passed: Callable[[], None],
) -> Mapping[int, Windows]:
    """By their number, the hidden states [windows, length, hidden] that the head reads, and those behind all layers.

    An earlier start's are used where they are whole; else `passed` is told once all are kept. Makes the model ready to
    give logits. PlanError where a token has more than one hidden state.
    """
    count, batch = len(model.layers), plan.opened.resources.batch
    if model.prepare(tokens[:1]) != plan.shape.hidden or model.streams != 1:
        path = plan.opened.headers.path
        raise PlanError(f"layers of {path} hand on more than one hidden state, of which a draft head knows none")
    names = {number: f"state{number}" for number in sorted({*plan.shape.states, count})}
    found = staged.hidden(dict.fromkeys(names.values(), (*tokens.shape, plan.shape.hidden)), model.dtype, 0)
    if found is not None:
        return {number: found.streams[name] for number, name in names.items()}
    kept: dict[int, Windows] = {}

    def written(number: int, batches: Iterator[Tensor]) -> Windows:
        if number not in names:
            return write_windows(batches, staged.folder / f"record-{number % 2}.bin", model.dtype)
        kept[number] = staged.keep_stream(names[number], 0, model.dtype, batches)
        return kept[number]

    with model.outer(embed=True, head=False):
        hidden = written(0, model.embedded(tokens, batch))
        for number in range(count):
            with model.layer(number) as layer:
                forward = Forward(model, number, Stream("target", layer, hidden), batch, workers)
                hidden = written(number + 1, forward.outputs())
            return_freed_memory()
    passed()
    return kept
