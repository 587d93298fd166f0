"""Recovery: scales and gains of a compressed model are trained until its predictions are nearer to the original's."""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from llmcompress.arch.spec import ArchSpec
from llmcompress.calib.base import fingerprint
from llmcompress.engine.process.process_memory import keep_freed_memory, return_freed_memory
from llmcompress.engine.recover.distill import Distillation
from llmcompress.engine.recover.own_text import own_text
from llmcompress.engine.recover.recover_plan import MADE_FROM, RecoverPlan
from llmcompress.engine.recover.rewritten import write_recovered
from llmcompress.engine.recover.trained_parts import TrainedParts
from llmcompress.engine.run.forward import Forward, Stream
from llmcompress.engine.run.opened_model import opened_model
from llmcompress.engine.run.tokens import tokens_for
from llmcompress.engine.source.open import open_checkpoint, round_as_stored
from llmcompress.engine.structure.derived_model import calibration_facts
from llmcompress.engine.train.trained import TrainedMatrix, TrainedNorm, TrainedWeight, TrainedWeights
from llmcompress.engine.train.training import AT_ONCE, Look, NoGainError, Training, TrainingText, held_apart, held_back
from llmcompress.engine.write.run_report import source_record
from llmcompress.errors import CheckpointError
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.recipe import Calibration
from llmcompress.significant import significant
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.output import OutputDirectory
from llmcompress.store.staging import Staging
from llmcompress.store.windows import Windows
from llmcompress.workers import SERIAL, Workers

Watch = Callable[[int, int], None]
_STREAM, _SHIPPED = "original", "shipped text"
_KEPT = 8  # times that what was learnt is kept, where it is as large as the model


def recover(plan: RecoverPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Train, write the model and return its report.

    RunError if the divergence on text held back did not fall: then nothing is written.
    """
    with plan.output(plan.opened.out, overwrite=plan.opened.options.overwrite) as out:
        return recover_into(plan, out, watch)


def recover_into(plan: RecoverPlan, out: OutputDirectory, watch: Watch) -> dict[str, Any]:
    """The same, the output being claimed."""
    opened = plan.opened
    _refuse_other_weights(plan)
    given = _given(plan)
    student = _opened(plan, plan.checkpoint, opened.matrices.spec)
    parts = TrainedParts(plan, student)
    student.weights = TrainedWeights(plan.checkpoint, parts.by_name)
    keep_freed_memory()
    identity = {**plan.identity, "tokens": fingerprint(torch.cat(list(given.values())))}
    with (
        closing(Staging(plan.work, identity, restart=opened.options.restart)) as staged,
        SERIAL.with_threads(opened.resources.threads) as workers,
    ):
        text = _text(plan, given, staged)
        teacher = _original(plan)
        layers, steps = len(teacher.layers), plan.request.steps
        states = _states(plan, teacher, text.tokens, staged, workers, lambda done: watch(done, layers + steps))
        learner = Distillation(student, teacher, states, text.tokens, parts.by_name, parts.places, workers)
        keeps = max(1, steps // _KEPT) if plan.trains_each else 1
        training = Training(learner, text, steps, AT_ONCE, plan.rate, opened.text.seed, keeps)
        try:
            first, best = training.run(staged, lambda done: watch(layers + done, layers + steps))
        except NoGainError:
            staged.remove()
            raise
        report = write_recovered(plan, parts.by_name, out, _record(plan, parts, text, first, best))
        out.commit()
        staged.remove()
    return report


def _refuse_other_weights(plan: RecoverPlan) -> None:
    """CheckpointError unless the original has the weights that the compressed model was made from."""
    if source_record(plan.original)["files_sha256"] != plan.report["source"].get("files_sha256"):
        raise CheckpointError(f"{plan.original.path} has other weights than what {plan.path} was made from", MADE_FROM)


def _given(plan: RecoverPlan) -> dict[str, Tensor]:
    """Windows of the text that is trained on and held back, and those of the shipped text that are held back alone."""
    dtype, trusted = plan.opened.resources.dtype, plan.opened.options.trust_remote_code

    def drawn(text: Calibration) -> Tensor:
        return tokens_for(text, plan.original.path, dtype, trusted)

    found = {"calibration": drawn(plan.opened.text)}
    if plan.other is not None:
        found[_SHIPPED] = drawn(plan.other)[list(held_back(plan.other.samples))]
    return found


def _text(plan: RecoverPlan, given: Mapping[str, Tensor], staged: Staging) -> TrainingText:
    """The windows of a run. Of all that is trained on, and of the shipped text, one in ONE_OF is held back."""
    parts, opened = {"calibration": given["calibration"]}, plan.opened
    if plan.request.written:
        text = opened.text.model_copy(update={"samples": plan.request.written})
        trusted = opened.options.trust_remote_code
        parts["written"] = own_text(plan.original, text, trusted, lambda: _original(plan), staged)
    own = held_apart(parts)
    if _SHIPPED not in given:
        return own
    tokens = torch.cat([own.tokens, given[_SHIPPED]])
    return TrainingText(tokens, own.trained, {**own.held, _SHIPPED: range(len(own.tokens), len(tokens))})


def _original(plan: RecoverPlan) -> StreamedModel:
    return _opened(plan, open_checkpoint(plan.original), plan.matrices.spec)


def _opened(plan: RecoverPlan, checkpoint: Checkpoint, spec: ArchSpec) -> StreamedModel:
    """A model that computes as the other does, and rounds inputs as its checkpoint says."""
    options, dtype = plan.opened.options, plan.opened.resources.dtype
    model = opened_model(checkpoint, spec, dtype, options, tiled_attention=False)
    round_as_stored(model, checkpoint)
    return model


def _states(
    plan: RecoverPlan,
    model: StreamedModel,
    tokens: Tensor,
    staged: Staging,
    workers: Workers,
    watch: Callable[[int], None],
) -> Windows:
    """The states of a model behind its last layer for all windows, kept after each layer for a later start."""
    batch, count = plan.opened.resources.batch, len(model.layers)
    with model.outer(embed=True, head=False):
        width = model.prepare(tokens[:1])
        hidden = staged.hidden({_STREAM: (*tokens.shape, width)}, model.dtype, count)
        hidden = hidden or staged.keep_hidden(0, model.dtype, {_STREAM: model.embedded(tokens, batch)})
    for number in range(hidden.position, count):
        with model.layer(number) as layer:
            forward = Forward(model, number, Stream(_STREAM, layer, hidden.streams[_STREAM]), batch, workers)
            hidden = staged.keep_hidden(number + 1, model.dtype, {_STREAM: forward.outputs()})
        return_freed_memory()
        watch(number + 1)
    return hidden.streams[_STREAM]


def _record(plan: RecoverPlan, parts: TrainedParts, text: TrainingText, first: Look, best: Look) -> dict[str, Any]:
    """What the report says of the recovery."""
    request, trained = plan.request, parts.by_name.values()
    return {
        "steps": request.steps,
        "windows_at_once": AT_ONCE,
        "rate": plan.rate,
        "best_step": best.step,
        "matrices": sum(isinstance(item, TrainedMatrix) for item in trained),
        "pruned": sum(isinstance(item, TrainedWeight) for item in trained),
        "weights": request.weights if plan.learns_weights else None,
        "norms": sum(isinstance(item, TrainedNorm) for item in trained),
        "calibration": calibration_facts(text.tokens),
        "held_back": {
            name: {
                "windows": len(text.held[name]),
                "kl_before": significant(value),
                "kl": significant(best.divergences[name]),
            }
            for name, value in first.divergences.items()
        },
    }
