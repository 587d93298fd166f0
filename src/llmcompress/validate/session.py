"""An evaluation as the command line asks for it: two models, a text, a protocol."""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmcompress.calib.base import refuse_unknown
from llmcompress.calib.default import shipped
from llmcompress.calib.documents import Document, token_ids
from llmcompress.calib.text import text_files
from llmcompress.engine.process.ranks import device_of
from llmcompress.engine.source.header_checks import check_length, vocabulary_size
from llmcompress.engine.source.multimodal import text_view
from llmcompress.engine.source.text_tokenizer import load_tokenizer
from llmcompress.errors import CheckpointError, RecipeError
from llmcompress.model.changing_cache import ChangingCache
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.headers import ModelHeaders, read_headers, read_json, refuse_adapter
from llmcompress.store.output_file import is_single, report_of
from llmcompress.validate.adapted_model import adapt_streamed, adapt_whole
from llmcompress.validate.evaluate import amount, cut_windows, measure_several
from llmcompress.validate.evaluation import DTYPE, evaluation
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.key_value_cache import ByScale, TokenCodes, cache_of
from llmcompress.validate.load import load_whole, open_streamed, refuse_other_vocabulary
from llmcompress.validate.omission import Contexts, of_items
from llmcompress.validate.packed import PackedLinear
from llmcompress.validate.reference_cache import ReferenceCache, reference_caches, refuse_cache
from llmcompress.validate.request import Request
from llmcompress.validate.rounded_products import measure_checked, windows_to_check
from llmcompress.validate.token_statistics import token_figures

DEFAULT_WINDOWS = 80


def evaluate_paths(request: Request, watch: Callable[[int, int], None]) -> dict[str, Any]:
    """The figures of `evaluate_whole`."""
    found: dict[str, Any] = evaluate_whole(request, watch)["figures"]
    return found


def evaluate_whole(
    request: Request,
    watch: Callable[[int, int], None],
    say: Callable[[str], None] = lambda line: None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The evaluation document of a model, against a reference if `request` has one.

    say: told where a backend does not do what was asked; tell: told of the windows once models are open.
    CheckpointError for models of different vocabularies.
    """
    check_models(request)
    _check_omission(request)
    windows = windows_of(request)
    if request.backend is not None:
        from llmcompress.validate.backed import validate

        expected = _expected(request.model) if request.ref is not None else {}
        about = request.model, request.ref, request.text
        run = validate(request, windows, watch, say, tell)
        found = {**run.figures, **expected, "kv_cache": run.cache and str(run.cache)}
        return evaluation(*about, windows.numpy(), run.dtype, found, run.tokens, run.runtime, run.ref_cache)
    (document,) = _measured([request], windows, watch, tell, request.dtype is None and request.omission is None)
    return document


def evaluate_together(
    requests: Sequence[Request], watch: Callable[[int, int], None], tell: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """The evaluation document of each of several models of one reference, which runs once.

    requests: without backends, and alike but for the model and what is left out of it. tell: as in `evaluate_whole`.
    """
    for request in requests:
        check_models(request)
        _check_omission(request)
    return _measured(requests, windows_of(requests[0]), watch, tell)


def _measured(
    requests: Sequence[Request],
    windows: Tensor,
    watch: Callable[[int, int], None],
    tell: Callable[[str], None],
    chooses: bool = False,
) -> list[dict[str, Any]]:
    """The documents of models that are run one section at a time, together.

    chooses: whether the products of one model may be rounded.
    """
    opened = [open_models(request) for request in requests]
    reference = opened[0][1]  # each was tried beside its model, and none has read a weight yet
    omitted = [
        None if request.omission is None else request.omission.install(subject)
        for request, (subject, *_) in zip(requests, opened, strict=True)
    ]
    caches: list[ReferenceCache | None] = []

    def kept(part: Tensor, rounds: bool) -> ReferenceCache | None:
        caches.append(cached(part, rounds))
        return caches[-1]

    cached, batch = reference_caches(requests[0], reference), requests[0].batch
    tell(amount(windows))
    subjects = [subject for subject, *_ in opened]
    products: dict[str, Any] | None = None
    checked = windows_to_check(windows, batch, reference) if chooses else 0
    if checked and reference is not None:
        tokens, products = measure_checked(subjects[0], reference, windows, checked, batch, watch, kept)
        found = [tokens]
    else:
        found = measure_several(subjects, reference, windows, batch, watch, kept(windows, False))
    outcomes = [cache.outcome for cache in caches if cache is not None]
    outcome = min(outcomes, key=["miss", "hit"].index, default=None)  # a hit where nothing was missing
    documents = []
    for request, (subject, *_, cache), layers, tokens in zip(requests, opened, omitted, found, strict=True):
        more: dict[str, Any] = _expected(request.model) if request.ref is not None else {}
        if request.omission is not None:
            tokens = tokens.after(request.omission.first(request.length))
            more = {"omitted": omission_said(request, layers or set(), len(subject.layers))}
        figures = {**token_figures(tokens), **more, "kv_cache": cache and str(cache)}
        about = request.model, request.ref, request.text
        dtype = request.dtype or DTYPE
        parts: dict[str, Any] = {"ref_cache": outcome, "products": products}
        documents.append(evaluation(*about, windows.numpy(), dtype, figures, tokens, **parts))
    return documents


def packed_ids(request: Request, tokenizer: Any) -> list[int]:
    """The token ids of all of a text, its files one behind the other; CalibrationError for one the model lacks."""
    documents = (Document(str(file), file) for file in evaluated_files(request.text))
    ids = [token for found in token_ids(tokenizer, documents, str(request.text)) for token in found]
    refuse_unknown(ids, vocabulary_size(_headers(request)), f"text {request.text}")
    return ids


def _headers(request: Request) -> ModelHeaders:
    """Of the original, or of the model without one; the language model's config where there is one inside."""
    return text_view(read_headers(request.ref or request.model))


def omission_said(request: Request, layers: set[int], of: int) -> str:
    """What was left out, and in how many layers; CheckpointError if in none."""
    if not layers:
        raise CheckpointError(
            f"{request.model}: {request.omission} leaves out nothing, since no layer has what it speaks of",
            "layers with sliding windows shorter than --length keep their cache",
        )
    return f"{request.omission} in {len(layers)} of {of} layers"


def windows_of(request: Request) -> Tensor:
    """The tokens to score: windows [windows, length].

    CalibrationError for a text that has too few; PlanError for windows longer than the model's positions.
    """
    check_length(_headers(request), request.length)
    ids = packed_ids(request, load_tokenizer(request.ref or request.model, request.trust_remote_code))
    wanted = request.windows or (
        max(1, min(DEFAULT_WINDOWS, len(ids) // request.length)) if request.text == "default" else DEFAULT_WINDOWS
    )
    return cut_windows(ids, request.length, wanted, f"text {request.text}")


def open_models(request: Request) -> tuple[StreamedModel, StreamedModel | None, TokenCodes | ByScale | None]:
    """A model and its reference, each run one section at a time, and the cache that is simulated."""
    opening = {
        "dtype": getattr(torch, request.dtype or DTYPE),
        "device": device_of(request.device),
        "trust_remote_code": request.trust_remote_code,
    }
    subject = open_streamed(request.model, source=request.ref, **opening)
    if request.adapter is not None:
        adapt_streamed(subject, request.adapter, request.model)
    cache = subject.cache = cache_of(request.model, request.cache)
    reference = None
    if request.ref is not None:
        reference = open_streamed(request.ref, **opening, adapter=request.ref_adapter)
    if reference is not None and request.ref is not None:
        refuse_other_vocabulary(request.model, subject.config, request.ref, reference.config)
    return subject, reference, cache


def _expected(model: Path) -> dict[str, float]:
    """The KL divergence that a budget's recipe expected, as the model's report recorded it; empty without a budget."""
    report = report_of(model) if is_single(model) else model / "report.json"
    recipe = read_json(report).get("recipe") if report.is_file() else None
    expected = recipe.get("expected") if isinstance(recipe, dict) else None
    kl = expected.get("kl") if isinstance(expected, dict) else None
    return {"kl_expected": float(kl)} if isinstance(kl, int | float) and math.isfinite(kl) else {}


def evaluated_files(text: str) -> list[Path]:
    """The files of a text to evaluate on: 'default', a file, or a folder."""
    place = shipped("eval_data") if text == "default" else Path(text)
    return text_files(place, suffixes=(".txt",)) if place.is_dir() else [place]


def check_models(request: Request) -> None:
    """CheckpointError for an adapter as the model, a GGUF file without a reference, or a GGUF file as the reference.

    A GGUF file has neither config.json nor tokenizer files. Errors of `refuse_cache`.
    """
    for path in filter(None, (request.model, request.ref)):
        refuse_adapter(path)
    if request.ref is None and gguf_in(request.model) is not None:
        raise CheckpointError(f"{request.model} is a GGUF file", "give the model it was made from as --ref")
    if request.ref is not None and gguf_in(request.ref) is not None:
        raise CheckpointError(f"--ref {request.ref} is a GGUF file", "give the original model's directory as --ref")
    if request.ref_cache is not None:
        refuse_cache(request.ref_cache, compared=request.ref is not None)


def _check_omission(request: Request) -> None:
    """RecipeError for windows that are too short for an omission."""
    if request.omission is not None:
        request.omission.check(request.length)


def continuations(request: Request, prompt: str, max_new_tokens: int) -> dict[str, str]:
    """Greedy continuations of a prompt by each model, the compressed one on its packed weights."""
    tokenizer = load_tokenizer(request.ref or request.model, request.trust_remote_code)
    ids = next(token_ids(tokenizer, [Document("the prompt", prompt)], "the prompt")).tolist()
    if not ids:
        raise RecipeError("the prompt of --generate has no tokens", "give some text")
    found = {str(request.model): writer(request, request.model)(ids, max_new_tokens)}
    if request.ref is not None:
        found[str(request.ref)] = writer(request, request.ref, original=True)(ids, max_new_tokens)
    return found


def writer(request: Request, path: Path, original: bool = False) -> Callable[..., str]:
    """Writes greedily: a function of token ids, the most tokens to write, and texts at which to end.

    path, original: as in `greedy_writer`.
    """
    tokenizer = load_tokenizer(request.ref or request.model, request.trust_remote_code)
    write = greedy_writer(request, path, original, tokenizer)

    def text(ids: Sequence[int], most: int, stops: Sequence[str] = ()) -> str:
        def stopped(written: Tensor, scores: object) -> Tensor:
            so_far = tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)
            return torch.tensor([any(stop in so_far for stop in stops)])

        (found,) = write(torch.tensor([ids]), most, [stopped] if stops else None)
        return str(tokenizer.decode(found, skip_special_tokens=True))

    return text


def greedy_writer(request: Request, path: Path, original: bool, tokenizer: Any) -> Callable[..., list[list[int]]]:
    """Writes greedily: a function of token ids [rows, length], the most tokens to write, and transformers' criteria.

    It gives the token ids that are written after each row, up to the token that ends a text. path: of the model, or of
    its `original`; it is held in memory, on its packed weights where they are codes.
    """
    linear = None if gguf_in(path) is not None else PackedLinear  # blocks would be decoded for every token
    contexts = Contexts()
    eviction = None if original else of_items(request.omission, contexts)
    model: Any = load_whole(
        path,
        dtype=torch.float32,
        linear=linear,
        trust_remote_code=request.trust_remote_code,
        source=request.ref,
        adapter=request.ref_adapter if original else None,
        prepare=None if eviction is None else eviction.install,
    )
    if not original and request.adapter is not None:
        adapt_whole(model, request.adapter, path)
    change = None if original else cache_of(path, request.cache)
    last = model.generation_config.eos_token_id
    ends = set(last if isinstance(last, list) else [] if last is None else [last])

    @torch.no_grad()
    def write(ids: Tensor, most: int, criteria: list[Callable[..., Tensor]] | None = None) -> list[list[int]]:
        contexts.rows = [ids.shape[1] - 1] * len(ids)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=most,
            past_key_values=None if change is None else ChangingCache(model.config, change),
            pad_token_id=tokenizer.eos_token_id,
            stopping_criteria=criteria,
        )
        written: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return [list(takewhile(lambda token: token not in ends, row)) for row in written]

    return write
