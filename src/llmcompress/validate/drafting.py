"""A compressed model as the draft of its original, or a head as that of its target, as the command line asks for it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmcompress.calib.documents import Document, token_ids
from llmcompress.engine.process.ranks import device_of
from llmcompress.engine.source.text_tokenizer import load_tokenizer
from llmcompress.errors import GateError, RecipeError
from llmcompress.model.draft_heads.head_files import is_draft
from llmcompress.store.headers import refuse_adapter
from llmcompress.validate.adapted_model import adapt_whole
from llmcompress.validate.backend import Backend, Say, compute_dtype, open_backend
from llmcompress.validate.drafting_head import ModelTarget, open_head, speculate_with_head, variations_by_depth
from llmcompress.validate.key_value_cache import CacheOptions
from llmcompress.validate.load import load_whole, open_streamed, refuse_other_vocabulary
from llmcompress.validate.request import Request
from llmcompress.validate.speculative import (
    Drafted,
    acceptance_figures,
    depths_of,
    sample,
    speculate,
    total_variations,
)
from llmcompress.validate.token_statistics import NOT_FINITE_HINT, Array

FIGURES = (
    "new_tokens",
    "steps",
    "accepted_per_step",
    "accepted_per_step_expected",
    "acceptance",
    "acceptance_expected",
)
_SEED = 0


def speculative_figures(request: Request, prompt: str, tokens: int, guesses: int, say: Say) -> dict[str, Any]:
    """Sample `tokens` tokens of request.ref after `prompt`, drafted by request.model, a model or a head.

    Returns the figures of validate/speculative.py, the text and the speeds.
    """
    ref = request.ref
    assert ref is not None
    for path in (request.model, ref):
        refuse_adapter(path)
    headed = is_draft(request.model)
    if headed and request.adapter is not None:
        raise RecipeError("--adapter is for a model, and --draft names a head", "leave it out")
    if request.cache != CacheOptions():
        raise RecipeError("--draft does not simulate caches", "leave --kv-bits and --kv-type out")
    backend = _backend(request, say)
    dtype = compute_dtype(request.dtype, backend)
    tokenizer = load_tokenizer(ref, request.trust_remote_code)
    asked = next(token_ids(tokenizer, [Document("the prompt", prompt)], "the prompt"))
    ids = torch.tensor([asked.tolist()], device=backend.device, dtype=torch.int64)
    if ids.numel() == 0:
        raise RecipeError("the prompt of --generate has no tokens", "give some text")
    common: dict[str, Any] = {
        "dtype": dtype,
        "device": backend.device,
        "trust_remote_code": request.trust_remote_code,
    }
    target: Any = load_whole(ref, **common, linear=backend.linears(say))
    target.register_forward_hook(partial(_refuse_not_finite, ref))
    if headed:
        found, apart = _by_head(request.model, ref, target, common, ids, tokens, guesses)
    else:
        draft: Any = load_whole(request.model, linear=backend.linears(say), source=ref, **common)
        draft.register_forward_hook(partial(_refuse_not_finite, request.model))
        refuse_other_vocabulary(request.model, draft.config, ref, target.config)
        if request.adapter is not None:
            adapt_whole(draft, request.adapter, request.model, backend.device)
        found = speculate(target, draft, ids, tokens, guesses, _SEED)
        apart = total_variations(target, draft, found)
    alone = sample(target, ids, tokens, _SEED)
    return {
        **acceptance_figures(found, apart),
        "draft_tokens": guesses,
        "generated": tokenizer.decode(found.ids[found.prompt :], skip_special_tokens=True),
        "speed": {"drafted": tokens / found.seconds, "alone": tokens / alone},
    }


def _by_head(
    path: Path, ref: Path, target: Any, common: dict[str, Any], ids: Tensor, tokens: int, guesses: int
) -> tuple[Drafted, Array]:
    """The text that a head has drafted, and its total variations [depths, new]."""
    if getattr(target, "_is_stateful", False):
        raise RecipeError(f"{ref} keeps a state from which no token can be taken back, so that nothing can be drafted")
    drafter = open_head(path, ref, target.config, target.get_input_embeddings().weight.detach(), common["dtype"])
    most = drafter.shape.most
    if most is not None and guesses > most:
        raise RecipeError(f"{path} drafts {most} tokens at a time, not {guesses}", f"use --draft-tokens {most}")
    model = ModelTarget(target, open_streamed(ref, **common).spec.layers, drafter.shape.states)
    found = speculate_with_head(model, drafter, ids, tokens, guesses, _SEED)
    return found, variations_by_depth(model, drafter, found, most or depths_of(guesses))


def _refuse_not_finite(path: Path, _: Any, __: Any, out: Any) -> None:
    """GateError for logits from which nothing can be drawn."""
    if not bool(out.logits[:, -1].isfinite().all()):
        raise GateError(f"{path} gives logits that are not finite", NOT_FINITE_HINT)


def _backend(request: Request, say: Say) -> Backend:
    """The backend that `request` asks for; torch if it names none."""
    if request.backend is None:
        return Backend("torch", device_of(request.device))
    return open_backend(request.backend, request.device, say)
