"""Recovery: scales and gains of a compressed model are trained until its predictions are nearer to the original's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.recover.distill import Distillation
from llmcompress.engine.recover.recover_plan import AT_ONCE, MADE_FROM, ONE_OF, RecoverPlan
from llmcompress.engine.recover.rewritten import write_recovered
from llmcompress.engine.recover.trained import Adam, TrainedMatrix, TrainedNorm, TrainedWeights
from llmcompress.engine.recover.trained_parts import TrainedParts
from llmcompress.engine.run.opened_model import opened_model
from llmcompress.engine.run.tokens import tokens_for
from llmcompress.engine.source.open import open_checkpoint, round_as_stored
from llmcompress.engine.structure.derived_model import calibration_facts
from llmcompress.engine.structure.source_model import embedded_windows, layer_outputs
from llmcompress.engine.write.run_report import source_record
from llmcompress.errors import CheckpointError, RunError
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.recipe import Calibration
from llmcompress.store.folder import Folder
from llmcompress.store.output import OutputDirectory
from llmcompress.store.windows import Windows
from llmcompress.workers import Workers

Watch = Callable[[int, int], None]
_LOOKS = 8  # times that text held back is looked at during training


class _Text(NamedTuple):
    """Windows [windows, length], the numbers of those that are trained on, and slices that are held back, by name."""

    tokens: Tensor
    trained: Sequence[int]
    held: Mapping[str, Sequence[int]]


class _Look(NamedTuple):
    """The divergence of each slice that is held back after some steps, and the logarithms there."""

    step: int
    divergences: Mapping[str, float]
    logs: Mapping[str, Tensor]

    @property
    def mean(self) -> float:
        return sum(self.divergences.values()) / len(self.divergences)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.divergences.items())


def recover(plan: RecoverPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Train, write the model and return its report.

    RunError if the divergence on text held back did not fall: then nothing is written.
    """
    opened = plan.opened
    with OutputDirectory(opened.out, overwrite=opened.options.overwrite) as out:
        _refuse_other_weights(plan)
        text = _text(plan)
        student = opened.model()
        round_as_stored(student, opened.checkpoint)
        parts = TrainedParts(plan, student)
        student.weights = TrainedWeights(opened.checkpoint, parts.by_name)
        with opened.scratch_folder(out) as (folder, workers):
            states = _original_states(plan, text.tokens, folder, workers, watch)
            learner = Distillation(student, *states, text.tokens, parts.by_name, parts.places, workers)
            first, *later = _train(plan, learner, text, watch)
        best = _best(first, later)
        for name, item in parts.by_name.items():
            item.log = best.logs[name]
        report = write_recovered(plan, parts.by_name, out, _record(plan, parts, text, first, best))
        out.commit()
    return report


def _refuse_other_weights(plan: RecoverPlan) -> None:
    """CheckpointError unless the original has the weights that the compressed model was made from."""
    if source_record(plan.original)["files_sha256"] != plan.report["source"].get("files_sha256"):
        raise CheckpointError(
            f"{plan.original.path} has other weights than what {plan.opened.headers.path} was made from", MADE_FROM
        )


def _text(plan: RecoverPlan) -> _Text:
    """The windows of a run. Of the text that is trained on, and of the shipped text, one in ONE_OF is held back."""
    dtype, trusted = plan.opened.resources.dtype, plan.opened.options.trust_remote_code

    def drawn(text: Calibration) -> Tensor:
        return tokens_for(text, plan.original.path, dtype, trusted)

    own = drawn(plan.opened.text)
    back = range(ONE_OF - 1, len(own), ONE_OF)
    trained = [number for number in range(len(own)) if number not in back]
    if plan.other is None:
        return _Text(own, trained, {"calibration": back})
    other = drawn(plan.other)[ONE_OF - 1 :: ONE_OF]
    held = {"calibration": back, "shipped text": range(len(own), len(own) + len(other))}
    return _Text(torch.cat([own, other]), trained, held)


def _original_states(
    plan: RecoverPlan, tokens: Tensor, folder: Folder, workers: Workers, watch: Watch
) -> tuple[StreamedModel, Windows]:
    """The original, and its states behind the last layer for all windows."""
    resources, checkpoint = plan.opened.resources, open_checkpoint(plan.original)
    model = opened_model(checkpoint, plan.matrices.spec, resources.dtype, plan.opened.options, tiled_attention=False)
    round_as_stored(model, checkpoint)
    file = folder / "original.bin"
    states = embedded_windows(model, tokens, resources.batch, file)
    for number in range(len(model.layers)):
        with model.layer(number) as layer:
            states = layer_outputs(model, number, layer, states, resources.batch, file, workers)
        watch(number + 1, len(model.layers) + plan.request.steps)
    return model, states


def _train(plan: RecoverPlan, learner: Distillation, text: _Text, watch: Watch) -> Iterator[_Look]:
    """Train, and look at what is held back: before, _LOOKS times on the way, and at the end."""
    steps, before = plan.request.steps, len(learner.student.layers)
    adam, generator = Adam(learner.trained), torch.Generator().manual_seed(plan.opened.text.seed)
    waiting: list[int] = []
    with learner.heads():
        yield _look(learner, text, 0)
        for step in range(steps):
            while len(waiting) < AT_ONCE:
                order = torch.randperm(len(text.trained), generator=generator)
                waiting += [text.trained[number] for number in order.tolist()]
            now, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            divergence, gradients = learner.gradients(now)
            if not math.isfinite(divergence):
                raise RunError(f"the divergence is {divergence} after {step} steps", "try a lower --rate")
            adam.step(gradients, plan.rate * (1 + math.cos(math.pi * step / steps)) / 2)
            return_freed_memory()
            if step + 1 == steps or (step + 1) % max(1, steps // _LOOKS) == 0:
                yield _look(learner, text, step + 1)
            watch(before + step + 1, before + steps)


def _look(learner: Distillation, text: _Text, step: int) -> _Look:
    divergences = {name: learner.divergence(windows) for name, windows in text.held.items()}
    return _Look(step, divergences, {name: item.log.clone() for name, item in learner.trained.items()})


def _best(first: _Look, later: Sequence[_Look]) -> _Look:
    """The look of least mean among those where no slice rose; RunError where there is none below the first."""
    risen = [any(not value <= first.divergences[name] for name, value in look.divergences.items()) for look in later]
    good = [look for look, rose in zip(later, risen, strict=True) if not rose and look.mean < first.mean]
    if not good:
        raise RunError(
            f"the divergence on text held back did not fall: {first} before, {later[-1]} at the end",
            "nothing was written; try a lower --rate, more --steps or other text",
        )
    return min(good, key=lambda look: look.mean)


def _record(plan: RecoverPlan, parts: TrainedParts, text: _Text, first: _Look, best: _Look) -> dict[str, Any]:
    """What the report says of the recovery."""
    request, trained = plan.request, parts.by_name.values()
    return {
        "steps": request.steps,
        "windows_at_once": AT_ONCE,
        "rate": plan.rate,
        "best_step": best.step,
        "matrices": sum(isinstance(item, TrainedMatrix) for item in trained),
        "norms": sum(isinstance(item, TrainedNorm) for item in trained),
        "calibration": calibration_facts(text.tokens),
        "held_back": {
            name: {
                "windows": len(text.held[name]),
                "kl_before": float(f"{value:.6g}"),
                "kl": float(f"{best.divergences[name]:.6g}"),
            }
            for name, value in first.divergences.items()
        },
    }
