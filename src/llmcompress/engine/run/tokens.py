"""The calibration tokens of a run, from the source that the recipe names."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmcompress.calib.base import TokenRequest
from llmcompress.calib.pack import resolve
from llmcompress.engine.source.header_checks import check_length, check_numbers, vocabulary_size
from llmcompress.engine.source.multimodal import text_view
from llmcompress.engine.source.text_tokenizer import load_tokenizer
from llmcompress.errors import CheckpointError
from llmcompress.model.skeleton import load_config
from llmcompress.recipe import Calibration
from llmcompress.store.headers import read_headers

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


def calibration_tokens(plan: "Plan") -> Tensor:
    """Token ids [samples, length] int64 for a plan."""
    return tokens_for(plan.recipe.calibration, plan.headers.path, plan.dtype, plan.options.trust_remote_code)


def tokens_for(asked: Calibration, model: Path, dtype: str, trust_remote_code: bool = False) -> Tensor:
    """Token ids [samples, length] int64 of the calibration `asked`, for the model directory `model`."""
    return _drawing(asked, model, dtype, trust_remote_code)()


def tokens_without_model(asked: Calibration, model: Path, dtype: str, trust_remote_code: bool = False) -> Tensor | None:
    """The same where no tensor has to be read for it, else None. Raises what drawing them would raise."""
    draw = _drawing(asked, model, dtype, trust_remote_code)
    return None if asked.source == "self" else draw()


def _drawing(asked: Calibration, model: Path, dtype: str, trust_remote_code: bool) -> Callable[[], Tensor]:
    """What draws the token ids of the calibration `asked`, once model, tokenizer and source are found to be of use.

    PlanError for windows longer than the model's positions.
    """
    headers = text_view(read_headers(model))
    check_numbers(headers)
    check_length(headers, asked.length)
    tokens = vocabulary_size(headers)
    source = resolve(asked.source, **asked.options)
    if source.name == "self":
        _sampled_config(model, trust_remote_code)
    request = TokenRequest(
        tokenizer=load_tokenizer(model, trust_remote_code) if source.needs_tokenizer else None,
        samples=asked.samples,
        length=asked.length,
        seed=asked.seed,
        vocab_size=tokens,
        model=lambda: _whole_model(model, dtype, trust_remote_code),
    )
    return lambda: source.tokens(request)


def _whole_model(model: Path, dtype: str, trust_remote_code: bool) -> Any:
    """The original model with all layers in memory, since sampling a token needs every layer."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model,
        config=_sampled_config(model, trust_remote_code),
        dtype=getattr(torch, dtype),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
    ).eval()


def _sampled_config(model: Path, trust_remote_code: bool) -> Any:
    """The config of a model that text can be sampled from; CheckpointError for any other model."""
    if (model / "adapter_config.json").exists():  # transformers would follow it to a model elsewhere
        raise CheckpointError(f"{model} holds an adapter (adapter_config.json)", "merge it into the model first")
    config = load_config(model, trust_remote_code)
    if config.get_text_config() is not config or getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{model} is quantised or multimodal, and text is sampled from original models of text alone",
            "give a text as --calibration",
        )
    return config
