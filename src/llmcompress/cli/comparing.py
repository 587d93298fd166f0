"""`compare`: several compressed models beside each other, from one pass of their original."""

from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcompress.cli import console, watching
from llmcompress.cli import options as flags
from llmcompress.cli.evaluation import weight_bytes
from llmcompress.cli.gates import gated
from llmcompress.cli.log import log
from llmcompress.cli.stopping import Stop
from llmcompress.errors import GateError, RecipeError

if TYPE_CHECKING:
    from llmcompress.api.evaluation import EvaluationResult


def register(app: typer.Typer) -> None:
    app.command("compare", rich_help_panel="Prove")(compare)


def compare(
    models: Annotated[
        list[Path], typer.Argument(help="Directories or GGUF files, all made from one original.", show_default=False)
    ],
    ref: Annotated[Path, typer.Option("--ref", help="The original, which runs once for all.", show_default=False)],
    ref_cache: flags.RefCache = None,
    text: Annotated[
        str, typer.Option("--text", help="Text file to evaluate on; default: text shipped with llmcompress.")
    ] = "default",
    length: Annotated[int, typer.Option("--length", min=2, max=1 << 24, help="Tokens per window.")] = 512,
    windows: Annotated[
        int | None,
        typer.Option(
            "--windows", min=1, max=1_000_000, help="Windows, from the start of the text. Default: as for `eval`."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=1_000_000, help="Windows run at once.")] = 4,
    device: flags.Device = "auto",
    compute_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option("--compute-dtype", help="Type that all models run in."),
    ] = "float32",
    trust_remote_code: flags.Trust = False,
    deadline: flags.Deadline = None,
    json_: flags.Json = False,
    junit: flags.Junit = None,
    log_format: flags.LogFormat = "text",
    quiet: flags.Quiet = False,
) -> None:
    """Size, divergence and agreement of several models in one table.

    Figures are those of `eval MODEL --ref ORIGINAL --compute-dtype float32`, on the same windows for all; the original
    runs once.
    All figures with their intervals: --json.
    """
    with watching.reading(quiet or json_):
        from llmcompress.api.evaluation import evaluated_together
        from llmcompress.validate.request import Request
        from llmcompress.validate.token_statistics import not_finite

    places = [path.resolve() for path in models]
    if twice := next((path for path in models if places.count(path.resolve()) > 1), None):
        raise RecipeError(f"{twice} is given twice", "give every model once")
    asked = text, length, windows, batch, device, compute_dtype, trust_remote_code
    requests = [Request(model, ref, *asked, ref_cache=ref_cache) for model in models]
    with gated("compare", junit):
        with watching.Steps("layers", quiet or (json_ and not log.active)) as steps:
            found = evaluated_together(requests, steps.at, Stop(deadline), steps.say)
        _show(ref, found, json_)
        for result in found:
            if said := not_finite(result.figures):
                raise GateError(f"{result.request.model}: {said}")


def _outcome(result: "EvaluationResult") -> dict[str, str]:
    """What came of the cache of the original, where there was one."""
    return {name: value for name, value in result.document.items() if name == "ref_cache"}


def _show(ref: Path, found: "list[EvaluationResult]", as_json: bool) -> None:
    sizes = [weight_bytes(result.request.model) for result in found]
    if as_json:
        console.print_json(
            [
                {"model": str(result.request.model), "bytes": nbytes, **result.figures, **_outcome(result)}
                for result, nbytes in zip(found, sizes, strict=True)
            ]
        )
        return
    from llmcompress.validate.token_statistics import shown

    whole = weight_bytes(ref)
    rows = []
    for result, nbytes in zip(found, sizes, strict=True):
        figures = result.figures
        low, high = figures.get("kl_ci", (nan, nan))
        rows.append(
            (
                str(result.request.model),
                console.size(nbytes),
                f"{nbytes / whole:.0%}",
                shown(figures["kl"], 3),
                f"{low:.3g} ... {high:.3g}" if isfinite(low + high) else "",
                f"{figures['top1']:.1%}",
                shown(figures["perplexity"]),
            )
        )
    figures = found[0].figures
    console.table(
        f"beside {ref} (perplexity {shown(figures['ref_perplexity'])}): {figures['windows']} windows of "
        f"{found[0].request.length} tokens",
        ("", "size", "share", "KL, nats", "95% interval", "top-1", "perplexity"),
        rows,
        right=range(1, 7),
    )
