"""Fidelity as a hub reads it: the `model-index` of a model card, which nothing else of the card changes for."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError, RecipeError, one_line
from llmcompress.store.output_file import is_single
from llmcompress.validate.evaluation import report_beside
from llmcompress.validate.published import FRONT, without_figures
from llmcompress.yamlfile import read_yaml

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

_METRICS = {
    "kl": "KL divergence from the original, mean (nats)",
    "kl_p99": "KL divergence from the original, 99th percentile (nats)",
    "top1": "Same most likely token as the original",
    "perplexity": "Perplexity",
    "ref_perplexity": "Perplexity of the original",
    "perplexity_ratio": "Perplexity over that of the original",
}
"""What of the figures of an evaluation the card gets, and what a hub shows it as."""
_SHARES = {
    "acc": "Items answered right",
    "acc_norm": "Items answered right, by characters",
    "ref_acc": "Items that the original answers right",
    "acc_drop": "Items answered right, lost",
}
"""The same of tasks."""


def card_of(model: Path) -> Path:
    """The card of an output; RecipeError where there is none, and CheckpointError for one that takes no figures."""
    card = model / "README.md"
    if is_single(model) or not card.is_file() or not report_beside(model).is_file():
        raise RecipeError(
            f"{model} has no model card to update", "give a directory llmcompress wrote, or leave --update-card out"
        )
    _read(card)
    return card


def card_with_figures(card: Path, document: Mapping[str, Any]) -> str:
    """The text of a card with the figures of an evaluation, in place of earlier ones on the same text or items.

    document: an evaluation, on text or tasks. CheckpointError for a card without front matter, or with a model-index
    that is none.
    """
    from huggingface_hub import ModelCardData

    text, data = _read(card)
    new = _of_tasks(document) if "asked" in document else _results(document)
    known = {result.unique_identifier for result in new}
    kept = [result for result in data.eval_results or [] if result.unique_identifier not in known]
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    name = data.model_name or (title[1] if title else document["model"]["name"])
    index = ModelCardData(model_name=name, eval_results=[*kept, *new]).to_yaml()
    matter, separator, rest = without_figures(text).partition("\n---\n")
    return f"{matter}\n{index}{separator}{rest}"


def _read(card: Path) -> "tuple[str, ModelCardData]":
    """The text of a card, and its front matter."""
    from huggingface_hub import ModelCardData

    try:
        text = card.read_bytes().decode()
        found = FRONT.match(text)
        matter = read_yaml(found[1]) if found else None
        if not isinstance(matter, dict):
            raise ValueError("it does not begin with lines of YAML between two lines of ---")
        return text, ModelCardData(**{str(key): value for key, value in matter.items()})
    except (OSError, ValueError, TypeError) as error:
        said = one_line(str(error))
        raise CheckpointError(f"{card} takes no figures: {said}", "mend it, or leave --update-card out") from None


def _results(document: Mapping[str, Any]) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    figures, text = document["figures"], document["text"]
    shipped = text["name"] == "default"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="llmcompress" if shipped else "text",
            dataset_name="the text shipped with llmcompress" if shipped else text["name"],
            dataset_revision=text["tokens_sha256"],
            dataset_args={"windows": text["windows"], "length": text["length"]},
            metric_type=key,
            metric_name=name,
            metric_value=figures[key],
            metric_args={"confidence_interval_95": figures[f"{key}_ci"]} if f"{key}_ci" in figures else None,
        )
        for key, name in _METRICS.items()
        if key in figures
    ]


def _of_tasks(document: Mapping[str, Any]) -> "list[EvalResult]":
    """An entry for each task."""
    from huggingface_hub import EvalResult

    asked = document["asked"]
    shipped = asked["name"] == "default"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="llmcompress" if shipped else "items",
            dataset_name=f"{task}, of {'the tasks shipped with llmcompress' if shipped else asked['name']}",
            dataset_config=task,
            dataset_revision=asked["items_sha256"],
            dataset_args={"items": figures["items"], "shots": asked["shots"], "chat": asked["chat"]},
            metric_type=key,
            metric_name=name,
            metric_value=figures[key],
            metric_args={"confidence_interval_95": figures[f"{key}_ci"]},
        )
        for task, figures in document["tasks"].items()
        for key, name in _SHARES.items()
        if key in figures
    ]
