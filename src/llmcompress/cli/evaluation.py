"""`eval`: how faithful a compressed model is."""

from collections.abc import Mapping
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmcompress.api.answers import Questions
from llmcompress.api.evaluation import EvaluationResult, evaluated, refuse_unmeasured_gates
from llmcompress.cli import answering, console, drafting, long_text, omitting, runtime_table, watching
from llmcompress.cli import options as flags
from llmcompress.cli.gates import gated
from llmcompress.cli.log import log
from llmcompress.cli.stopping import Stop
from llmcompress.errors import RecipeError

if TYPE_CHECKING:
    from llmcompress.validate.request import Request

_NEW, _DRAFTED = 48, 4  # tokens of a continuation, and drafted at a time
_ROWS = (
    ("perplexity", "perplexity"),
    ("ref_perplexity", "perplexity of the reference"),
    ("perplexity_ratio", "ratio of the two"),
    ("kl", "KL divergence, mean (nats)"),
    ("kl_expected", "KL divergence, as `fit` expected"),
    ("kl_median", "KL divergence, median"),
    ("kl_p99", "KL divergence, 99th percentile"),
    ("kl_p999", "KL divergence, 99.9th percentile"),
    ("top1", "same most likely token"),
    ("tv", "total variation (1 - acceptance as a draft)"),
    ("logits_error", "error of logits against the decoded model"),
    ("logits_error_max", "error of logits, worst token"),
    ("logits_bound", "error that rounding may cause"),
)


def register(app: typer.Typer) -> None:
    app.command("eval", rich_help_panel="Prove")(evaluate)


def evaluate(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Any directory or GGUF file llmcompress writes, or an original model. None with --draft.",
            show_default=False,
        ),
    ] = None,
    ref: Annotated[
        Path | None, typer.Option("--ref", help="The original, to measure divergence from; a GGUF file needs it.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="A LoRA adapter of the model, such as `lora` writes.")
    ] = None,
    ref_adapter: Annotated[
        Path | None,
        typer.Option("--ref-adapter", help="A LoRA adapter of the original, for a model that was compressed with it."),
    ] = None,
    ref_cache: flags.RefCache = None,
    text: Annotated[
        str, typer.Option("--text", help="Text file to evaluate on; default: text shipped with llmcompress.")
    ] = "default",
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="In place of text: questions with choices, or texts to finish. A .jsonl or .parquet file, a folder of "
            "them, or 'default': those shipped with llmcompress.",
        ),
    ] = None,
    items: Annotated[
        int | None,
        typer.Option(
            "--items",
            min=1,
            max=1_000_000,
            help="Items of each task, from its start. Default: all. With --long: facts at each depth of text of each "
            "length. Default: 2.",
        ),
    ] = None,
    shots: Annotated[
        int,
        typer.Option(
            "--shots",
            min=0,
            max=1000,
            help="Worked examples before each item of --tasks, from NAME.shots.jsonl beside it.",
        ),
    ] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the questions of --tasks through the chat template, as a user does.")
    ] = False,
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="In long text instead: divergence by position, whether facts planted in text are found again, and how "
            "much of 200 greedy tokens is repetition.",
        ),
    ] = False,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            min=2,
            max=1 << 24,
            help="Tokens per window. Default: 512; with --long the model's context, at most 4096.",
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            "--windows",
            min=1,
            max=1_000_000,
            help="Windows, from the start of the text. Default: 80, or all of the shipped text; with --long 16.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, max=1_000_000, help="Windows run at once. Default: 4; with --long 1."),
    ] = None,
    device: flags.Device = "auto",
    backend: Annotated[
        Literal["auto", "kernels", "torch"] | None,
        typer.Option(
            "--backend",
            help="Run the whole model at once on packed weights, by our CUDA kernels or by torch, and say how fast it "
            "is and whether its logits are what its codes say. auto: kernels where they can run, else torch.",
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            help="In place of a model: have it draft what --ref writes after the prompt of --generate, and count what "
            "is accepted.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option("--draft-tokens", min=1, max=1000, help="Tokens that --draft drafts at a time. Default: 4."),
    ] = None,
    compute_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            "--compute-dtype",
            help="Type both models run in. Default: bfloat16 where kernels run; else float32, with products in "
            "bfloat16 where that is faster and KL of the first windows says that it may be.",
        ),
    ] = None,
    fail_if: Annotated[
        list[str] | None, typer.Option("--fail-if", help="Exit with 3 if true, such as 'kl > 0.05'. Repeatable.")
    ] = None,
    generate: Annotated[
        str | None, typer.Option("--generate", help="Continue this prompt with each model, side by side.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, max=1_000_000, help="Tokens that --generate adds. Default: 48."),
    ] = None,
    kv_bits: Annotated[
        int | None,
        typer.Option(
            "--kv-bits",
            help="Simulate keys and values cached in 8 or 4 bits; 16: not, whatever scales the checkpoint brings.",
        ),
    ] = None,
    kv_type: Annotated[
        Literal["int", "fp8", "nvfp4"] | None,
        typer.Option(
            "--kv-type",
            help="int: asymmetric, per token and head. fp8, nvfp4: by the checkpoint's scales, or 1. "
            "Default: what the checkpoint's config.json says, int with --kv-bits.",
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            "--kv",
            help="Evict a share of the cached keys and values of each window's first half before the other goes on, or "
            "of each prompt of --tasks before its answer: snapkv:0.5, or several with commas. Scores: streaming, h2o, "
            "snapkv, tova, knorm, expected.",
        ),
    ] = None,
    mlp_sparsity: Annotated[
        str | None,
        typer.Option(
            "--mlp-sparsity", help="Leave out the share of neurons that matter least to each token: 0.5, or 0.5,0.9."
        ),
    ] = None,
    attention_sparsity: Annotated[
        str | None,
        typer.Option(
            "--attention-sparsity", help="Leave out the share of each query's attention weights that are the smallest."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Save the whole result as JSON, for `report`."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --output if it exists.")] = False,
    update_card: Annotated[
        bool,
        typer.Option("--update-card", help="Write the figures into the output's README.md, as hubs show them."),
    ] = False,
    trust_remote_code: flags.Trust = False,
    deadline: flags.Deadline = None,
    json_: flags.Json = False,
    junit: flags.Junit = None,
    log_format: flags.LogFormat = "text",
    quiet: flags.Quiet = False,
) -> None:
    """Perplexity, and divergence from the original, with confidence intervals.

    Protocol: the text is tokenised once, cut into disjoint windows from its start, and every position but the first
    of a window is scored on the full vocabulary. Intervals are 95%, by bootstrap over windows.
    """
    with watching.reading(quiet or json_):
        from llmcompress.store.files import refuse_existing
        from llmcompress.store.unfinished import refuse_unclaimable, write_whole
        from llmcompress.validate.card_figures import card_of, card_with_figures
        from llmcompress.validate.evaluate import parse_gate
        from llmcompress.validate.key_value_cache import CacheOptions
        from llmcompress.validate.omission import Eviction, omissions_of
        from llmcompress.validate.request import Request, with_omission
        from llmcompress.validate.token_statistics import not_finite

    subject = _subject(model, draft)
    given = {"--draft": draft, "--generate": generate, "--backend": backend}
    if tasks is not None:
        _refuse_beside("--tasks", {**given, "--text": text != "default", "--long": long}, "evaluate each on its own")
        _refuse_beside("--tasks", {"--length": length, "--windows": windows}, "use --items for questions")
    of_text = {"--text": text != "default", "--length": length, "--windows": windows, "--batch": batch}
    _refuse_beside_draft(draft, {**of_text, "--deadline": deadline})
    _refuse_alone("--draft-tokens", draft_tokens, "--draft", draft)
    _refuse_alone("--max-new-tokens", max_new_tokens, "--generate", generate)
    if ref_cache is not None:
        others = {"--tasks": tasks, "--long": long, "--draft": draft}
        _refuse_beside("--ref-cache", others, "it keeps what a reference gives for windows of text")
    if long:
        _refuse_beside("--long", {**given, "--update-card": update_card}, "evaluate each on its own")
    if ref_adapter is not None and (ref is None or draft is not None or backend is not None):
        raise RecipeError(
            "--ref-adapter is merged into --ref, where both models run a section at a time",
            "leave --draft and --backend out" if ref is not None else "give the original model's directory as --ref",
        )
    if tasks is None:
        _refuse_of_tasks(None if long else items, chat, shots)
    if update_card:
        measures = {"--draft": draft, "--adapter": adapter, "--kv-bits": kv_bits, "--kv-type": kv_type}
        _refuse_beside("--update-card", measures, "the card has figures of the output as it is")
    omissions = omissions_of(kv, mlp_sparsity, attention_sparsity)
    omitting.refuse_others({**given, "--long": long, "--update-card": update_card}, omissions)
    omitting.refuse_others({"--tasks": tasks}, [one for one in omissions if not isinstance(one, Eviction)])
    card = card_of(subject) if update_card else None
    cache_options = CacheOptions(kv_bits, kv_type)
    request = Request(
        subject,
        ref,
        text,
        length or 512,
        windows,
        batch or (1 if long else 4),
        device,
        compute_dtype,
        trust_remote_code,
        adapter,
        cache_options,
        backend,
        ref_adapter=ref_adapter,
        ref_cache=ref_cache,
    )
    if len(omissions) > 1:
        omitting.refuse_others(
            {"--tasks": tasks, "--output": output, "--fail-if": fail_if, "--junit": junit}, omissions
        )
        with watching.Steps("layers", quiet or (json_ and not log.active)) as steps:
            omitting.run(request, omissions, steps, Stop(deadline), json_)
        return
    request = with_omission(request, *omissions)
    with gated("eval", junit) as gates:
        if draft is not None:
            drafting.run(
                request, generate, max_new_tokens or _NEW, draft_tokens or _DRAFTED, fail_if or [], output, gates, json_
            )
            return
        if output is not None:
            refuse_existing(output, overwrite)
            refuse_unclaimable(output)
        if tasks is not None:
            questions = Questions(tasks, items, shots, chat)
            with watching.Steps("layers", quiet or (json_ and not log.active)) as steps:
                answering.run(
                    request, questions, fail_if or [], output, overwrite, card, gates, steps, Stop(deadline), json_
                )
            return
        if long:
            with watching.Steps("layers", quiet or (json_ and not log.active)) as steps:
                long_text.run(
                    request, length, items or 2, fail_if or [], output, overwrite, gates, steps, Stop(deadline), json_
                )
            return
        conditions = {text: parse_gate(text) for text in fail_if or []}
        gates.expect(f"--fail-if {text}" for text in conditions)
        refuse_unmeasured_gates(request, conditions.values())
        with watching.Steps("layers", quiet or (json_ and not log.active)) as steps:
            result = evaluated(request, steps.at, Stop(deadline), console.say, steps.say)
        if output is not None and not_finite(result.figures) is None:
            result.save(output, overwrite=overwrite)
        if card is not None and not_finite(result.figures) is None:
            write_whole(card, card_with_figures(card, result.document).encode(), overwrite=True)
        log.event("figures", **result.figures)
        samples = None if generate is None else _written(result, generate, max_new_tokens or _NEW, output)
        _show(request, result.document, samples, json_)
        if output is not None and not (json_ or quiet):
            console.next_step("report", subject, "--evaluation", output)
        gates.judge_figures(result.figures, conditions)


def _written(result: EvaluationResult, prompt: str, tokens: int, output: Path | None) -> dict[str, str]:
    """What each model writes after a prompt; it is added to what was saved."""
    from llmcompress.validate.session import continuations
    from llmcompress.validate.token_statistics import not_finite

    samples = continuations(result.request, prompt, tokens)
    if output is not None and not_finite(result.figures) is None:
        result.with_written(prompt, samples).save(output, overwrite=True)
    return samples


def _refuse_of_tasks(items: int | None, chat: bool, shots: int) -> None:
    """RecipeError if any option was given that is for --tasks."""
    if items is not None:
        raise RecipeError("--items counts items of --tasks, or facts of --long", "use --windows for text")
    if chat or shots:
        name = "--chat" if chat else "--shots"
        raise RecipeError(f"{name} is for the questions of --tasks", f"give --tasks, or leave {name} out")


def _refuse_beside(option: str, others: Mapping[str, Any], hint: str) -> None:
    """RecipeError if any of the options that do not go with one was given."""
    for name, value in others.items():
        if value:
            raise RecipeError(f"{option} does not go with {name}", hint)


def _refuse_beside_draft(draft: Path | None, others: Mapping[str, Any]) -> None:
    """RecipeError if any option of an evaluation on text was given beside --draft."""
    if draft is not None:
        _refuse_beside("--draft", others, "its text is what --generate begins with")


def _refuse_alone(option: str, value: int | None, other: str, needed: object) -> None:
    """RecipeError if an option was given without the one that it belongs to."""
    if value is not None and needed is None:
        raise RecipeError(f"{option} is of use with {other} only", f"give {other}, or leave it out")


def _subject(model: Path | None, draft: Path | None) -> Path:
    """What is evaluated; RecipeError unless it is one thing."""
    subject = model or draft
    if subject is None or (model is not None and draft is not None):
        raise RecipeError(
            "eval takes a model, or one that drafts", "write `eval MODEL`, or `eval --draft MODEL --ref ORIGINAL`"
        )
    return subject


def _show(request: "Request", found: Mapping[str, Any], samples: dict[str, str] | None, as_json: bool) -> None:
    figures, runtime = found["figures"], found.get("runtime")
    if as_json:
        more = {name: found.get(name) for name in ("runtime", "ref_cache", "products")} | {"generated": samples}
        console.print_json({**figures, **{name: value for name, value in more.items() if value is not None}})
        return
    from llmcompress.validate.rounded_products import products_row
    from llmcompress.validate.token_statistics import not_finite, shown

    rows = []
    for key, label in _ROWS:
        if key in figures:
            low, high = figures.get(f"{key}_ci", (nan, nan))
            rows.append((label, shown(figures[key]), f"{low:.5g} ... {high:.5g}" if isfinite(low + high) else ""))
    products = found.get("products")
    if products is not None:
        rows.append(products_row(products))
    cached = ", products in bfloat16" if products is not None and products["dtype"] == "bfloat16" else ""
    cached += f", keys and values {figures['kv_cache']}" if figures["kv_cache"] else ""
    cached += f", {figures['omitted']}" if request.omission is not None else ""
    cached += ", reference from its cache" if found.get("ref_cache") == "hit" else ""
    console.table(
        f"{request.model}: {figures['windows']} windows of {request.length} tokens, {figures['tokens']} scored, "
        f"{found['compute_dtype']}{cached}{'' if (said := not_finite(figures)) is None else f'; {said}'}",
        ("", "value", "95% interval"),
        rows,
        right=(1, 2),
    )
    if runtime is not None:
        runtime_table.show(runtime, figures)
    for name, continuation in (samples or {}).items():
        console.table(name, ("",), [(continuation,)])
    if request.ref is not None and request.adapter is None and request.omission is None and "top1" in figures:
        share = weight_bytes(request.model) / weight_bytes(request.ref)
        console.say(
            f"the same next token as the original {figures['top1']:.1%} of the time, at {share:.0%} of its size"
        )


def weight_bytes(model: Path) -> int:
    """Bytes of all tensors of a model directory, or of a GGUF file with all its shards."""
    from llmcompress.store.gguf_model import read_gguf
    from llmcompress.store.headers import read_headers
    from llmcompress.validate.gguf_file import gguf_in

    file = gguf_in(model)
    return read_headers(model).nbytes if file is None else read_gguf(file).nbytes
