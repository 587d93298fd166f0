"""A draft head for a model, trained on the model's own hidden states, and written as engines read heads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from llmcompress import __version__
from llmcompress.calib.base import fingerprint
from llmcompress.engine.draft.draft_plan import GUESSES, DraftPlan, stored
from llmcompress.engine.draft.learner import DraftLearner
from llmcompress.engine.draft.states import target_model, target_states, training_text
from llmcompress.engine.process.process_memory import keep_freed_memory
from llmcompress.engine.structure.derived_model import calibration_facts
from llmcompress.engine.train.training import AT_ONCE, Look, NoGainError, Training, TrainingText
from llmcompress.engine.write.run_report import source_record
from llmcompress.model.draft_heads.base import HeadKind
from llmcompress.model.draft_heads.head_files import CONFIG
from llmcompress.significant import significant
from llmcompress.store.checkpoint import DTYPES
from llmcompress.store.output import OutputDirectory
from llmcompress.store.staging import Staging
from llmcompress.workers import SERIAL

Watch = Callable[[int, int], None]
_KEPT = 8  # times that what was learnt is kept


def train_draft(plan: DraftPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Train a head, write it and return its report.

    The pass of the text through the target is one step of `watch`. RunError if the loss on text held back did not fall:
    then nothing is written.
    """
    opened, request = plan.opened, plan.request
    with OutputDirectory(opened.out, overwrite=opened.options.overwrite) as out:
        given = opened.tokens()
        identity = {**plan.identity, "tokens": fingerprint(given)}
        keep_freed_memory()
        with (
            closing(Staging(plan.work, identity, restart=opened.options.restart)) as staged,
            SERIAL.with_threads(opened.resources.threads) as workers,
        ):
            text = training_text(plan, given, staged)
            model = target_model(plan)
            passed = partial(watch, 1, 1 + request.steps)
            states = target_states(plan, model, text.tokens, staged, workers, passed)
            with model.outer(embed=True, head=True):
                learner = DraftLearner(plan, model, text, states, workers)
                keeps = max(1, request.steps // _KEPT)
                training = Training(learner, text, request.steps, AT_ONCE, request.rate, opened.text.seed, keeps)
                try:
                    first, best = training.run(staged, lambda done: watch(1 + done, 1 + request.steps))
                except NoGainError:
                    staged.remove()
                    raise
                with learner.heads():
                    accepted = {name: learner.acceptances(held, GUESSES) for name, held in text.held.items()}
            report = _written(plan, learner, out, _record(plan, text, first, best, accepted))
            out.commit()
            staged.remove()
    return report


def _written(plan: DraftPlan, learner: DraftLearner, out: OutputDirectory, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write all files of the head; returns the report, with the `record` of its training."""
    opened, dtype = plan.opened, DTYPES[plan.dtype]
    said = opened.headers.config.get("architectures")
    architectures = [str(item) for item in said] if isinstance(said, list) else []
    hashes = out.write_weights(plan.specs, _tensors(plan, learner, dtype), shard_bytes=1 << 62)
    name = opened.headers.name
    out.write_json(CONFIG, plan.shape.config(str(dtype).removeprefix("torch."), GUESSES, name, architectures))
    report = {
        "llmcompress": __version__,
        "format": plan.kind.name,
        "source": {**source_record(opened.headers), "contents_sha256": stored(opened.headers).contents},
        "calibration": record["calibration"],
        "compute_dtype": opened.resources.dtype,
        "output_bytes": plan.nbytes,
        "draft": {key: value for key, value in record.items() if key != "calibration"},
        "ledger": opened.ledger.as_json(),
        "tensors": hashes,
    }
    out.write_text("README.md", _card(name, plan.kind, report))
    return out.write_report(report)


def _tensors(plan: DraftPlan, learner: DraftLearner, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, item in learner.trained.items():
        yield name, item.value().to(dtype)
    yield from plan.shape.id_tensors(learner.ids).items()


def _record(
    plan: DraftPlan, text: TrainingText, first: Look, best: Look, accepted: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """What the report says of the training."""
    request, shape = plan.request, plan.shape
    return {
        "steps": request.steps,
        "windows_at_once": AT_ONCE,
        "rate": request.rate,
        "best_step": best.step,
        "vocabulary": shape.vocabulary,
        "states": list(shape.states),
        "share_of_weights": significant(plan.share, 4),
        "written": request.written,
        "calibration": calibration_facts(text.tokens),
        "held_back": {
            name: {
                "windows": len(text.held[name]),
                "loss_before": significant(value),
                "loss": significant(best.divergences[name]),
                "acceptance": [significant(share, 4) for share in accepted[name]],
                "accepted_per_step": significant(sum(accumulate(accepted[name], mul)), 4),
            }
            for name, value in first.divergences.items()
        },
    }


def _card(target: str, kind: HeadKind, report: Mapping[str, Any]) -> str:
    made = report["draft"]
    rows = "\n".join(f"| {name} | {item['accepted_per_step']:.2f} |" for name, item in made["held_back"].items())
    tags = "".join(f"- {tag}\n" for tag in ("llmcompress", *kind.tags))
    serving = f'{{"model": "DRAFT", "method": "{kind.name}", "num_speculative_tokens": {GUESSES}}}'
    return (
        f"---\nbase_model: {target!r}\ntags:\n{tags}---\n\n"
        f"# Draft head for {target}\n\n"
        f"{kind.title} that drafts for {target}, and for no other model, trained on its hidden states with "
        f"llmcompress {report['llmcompress']}. It has {made['share_of_weights']:.1%} of the model's weights. "
        f"{kind.readers}:\n\n"
        f"```sh\nvllm serve TARGET --speculative-config '{serving}'\n```\n\n"
        f"Of {GUESSES} drafted tokens the model accepts, by total variation on text held back:\n\n"
        f"| text | tokens |\n| --- | ---: |\n{rows}\n"
    )
