"""`eval --kv`, `--mlp-sparsity` and `--attention-sparsity` of several values: what each costs, in one table."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from llmcompress.api.evaluation import evaluated_together
from llmcompress.cli import console, watching
from llmcompress.cli.log import log
from llmcompress.errors import RecipeError

if TYPE_CHECKING:
    from llmcompress.cli.stopping import Stop
    from llmcompress.validate.omission import Omission
    from llmcompress.validate.request import Request


def refuse_others(given: Mapping[str, Any], omissions: "Sequence[Omission]") -> None:
    """RecipeError for the first option of `given` that has a value, if anything is left out."""
    if omissions and (others := [name for name, value in given.items() if value]):
        raise RecipeError(
            f"{others[0]} does not go with {' and '.join(map(str, omissions[:2]))}",
            "measure one value at a time" if len(omissions) > 1 else "evaluate each on its own",
        )


def run(
    request: "Request", omissions: "Sequence[Omission]", steps: watching.Steps, stop: "Stop", as_json: bool
) -> None:
    """Measure several omissions against one reference and show their figures; GateError if some are not finite."""
    from llmcompress.validate.request import with_omission
    from llmcompress.validate.token_statistics import refuse_not_finite, shown

    found = evaluated_together([with_omission(request, omission) for omission in omissions], steps.at, stop, steps.say)
    log.event("figures", omissions=[result.figures for result in found])
    if as_json:
        console.print_json([result.figures for result in found])
    else:
        first = found[0].document
        console.table(
            f"{request.model}: {first['text']['windows']} windows of {request.length} tokens, {first['compute_dtype']}",
            ("left out", "tokens", "KL divergence", "95% interval", "perplexity ratio", "same top token"),
            [
                (
                    str(result.figures["omitted"]),
                    str(result.figures["tokens"]),
                    shown(result.figures["kl"]),
                    _interval(result.figures),
                    shown(result.figures["perplexity_ratio"]),
                    f"{result.figures['top1']:.1%}",
                )
                for result in found
            ],
            right=(1, 2, 3, 4, 5),
        )
    for result in found:
        refuse_not_finite(result.figures)


def _interval(figures: Mapping[str, Any]) -> str:
    low, high = figures.get("kl_ci", (nan, nan))
    return f"{low:.5g} ... {high:.5g}" if isfinite(low + high) else ""
