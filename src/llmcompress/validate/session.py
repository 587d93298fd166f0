"""An evaluation as the command line asks for it: two models, a text, a protocol."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llmcompress.calib.default import shipped
from llmcompress.calib.documents import encode
from llmcompress.calib.text import read_text, text_files
from llmcompress.engine.calibration import load_tokenizer
from llmcompress.engine.ranks import device_of
from llmcompress.errors import CheckpointError
from llmcompress.model.cache import ChangingCache
from llmcompress.store.headers import read_json, refuse_adapter
from llmcompress.store.output_file import is_single, report_of
from llmcompress.validate.adapter import adapt_streamed, adapt_whole
from llmcompress.validate.cache import Asked, cache_of
from llmcompress.validate.evaluate import cut_windows, measure
from llmcompress.validate.evaluation import evaluation
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.load import load_whole, open_streamed
from llmcompress.validate.statistics import figures

DEFAULT_WINDOWS = 80


@dataclass(frozen=True)
class Request:
    """What to evaluate: directories, text ('default' or a path), windows [windows, length] and how to run.

    model may be a GGUF file; ref is then the directory it was made from.
    """

    model: Path
    ref: Path | None
    text: str
    length: int
    windows: int | None
    batch: int
    device: str
    dtype: str
    trust_remote_code: bool = False
    adapter: Path | None = None  # of the model
    cache: Asked = field(default_factory=Asked)  # of the model; the reference has none that is quantised


def evaluate_paths(request: Request, watch: Callable[[int, int], None]) -> dict[str, Any]:
    """The figures of `evaluate_whole`."""
    found: dict[str, Any] = evaluate_whole(request, watch)["figures"]
    return found


def evaluate_whole(request: Request, watch: Callable[[int, int], None]) -> dict[str, Any]:
    """The evaluation of a model (validate/evaluation.py), against a reference if one is given.

    Refuses models of different vocabularies.
    """
    _check(request)
    tokenizer = load_tokenizer(request.ref or request.model, request.trust_remote_code)
    ids = [token for file in texts(request.text) for token in encode(tokenizer, read_text(file), str(file))]
    wanted = request.windows or (
        min(DEFAULT_WINDOWS, len(ids) // request.length) if request.text == "default" else DEFAULT_WINDOWS
    )
    windows = cut_windows(ids, request.length, wanted, f"text {request.text}")
    opening = {
        "dtype": getattr(torch, request.dtype),
        "device": device_of(request.device),
        "trust_remote_code": request.trust_remote_code,
    }
    subject = open_streamed(request.model, source=request.ref, **opening)
    if request.adapter is not None:
        adapt_streamed(subject, request.adapter, request.model)
    cache = subject.cache = cache_of(request.model, request.cache)
    reference = open_streamed(request.ref, **opening) if request.ref is not None else None
    if reference is not None and subject.config.vocab_size != reference.config.vocab_size:
        raise CheckpointError(
            f"{request.model} has {subject.config.vocab_size} tokens, {request.ref} has {reference.config.vocab_size}",
            "give the model that was compressed as --ref",
        )
    tokens = measure(subject, reference, windows, request.batch, watch)
    found = {
        **figures(tokens),
        **(_expected(request.model) if reference is not None else {}),
        "kv_cache": cache and str(cache),
    }
    return evaluation(request.model, request.ref, request.text, windows.numpy(), request.dtype, found, tokens)


def _expected(model: Path) -> dict[str, float]:
    """The KL divergence that the recipe of a result was fitted for, where its report says so."""
    report = report_of(model) if is_single(model) else model / "report.json"
    recipe = read_json(report).get("recipe") if report.is_file() else None
    expected = recipe.get("expected") if isinstance(recipe, dict) else None
    kl = expected.get("kl") if isinstance(expected, dict) else None
    return {"kl_expected": float(kl)} if isinstance(kl, int | float) else {}


def texts(text: str) -> list[Path]:
    """The files of a text to evaluate on: 'default', a file, or a folder."""
    place = shipped("eval_data") if text == "default" else Path(text)
    return text_files(place, suffixes=(".txt",)) if place.is_dir() else [place]


def _check(request: Request) -> None:
    """CheckpointError for an adapter alone, and for a GGUF file without, or as, a reference.

    Such a file has neither config.json nor tokenizer files.
    """
    for path in filter(None, (request.model, request.ref)):
        refuse_adapter(path)
    if request.ref is None and gguf_in(request.model) is not None:
        raise CheckpointError(f"{request.model} is a GGUF file", "give the model it was made from as --ref")
    if request.ref is not None and gguf_in(request.ref) is not None:
        raise CheckpointError(f"--ref {request.ref} is a GGUF file", "give the original model's directory as --ref")


def continuations(request: Request, prompt: str, max_new_tokens: int) -> dict[str, str]:
    """Greedy continuations of a prompt by each model, the compressed one on its packed weights."""
    tokenizer = load_tokenizer(request.ref or request.model, request.trust_remote_code)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    result = {}
    for path in (request.model, request.ref):
        if path is None:
            continue
        model = load_whole(path, dtype=torch.float32, trust_remote_code=request.trust_remote_code, source=request.ref)
        if path == request.model and request.adapter is not None:
            adapt_whole(model, request.adapter, path)
        change = cache_of(path, request.cache) if path == request.model else None
        with torch.no_grad():
            out = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                past_key_values=None if change is None else ChangingCache(model.config, change),
                pad_token_id=tokenizer.eos_token_id,
            )
        result[str(path)] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return result
