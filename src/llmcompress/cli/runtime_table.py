"""How a model was run as a whole, for people: what multiplied, memory, tokens per second."""

from collections.abc import Mapping
from typing import Any

from llmcompress.cli import console


def show(runtime: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """runtime: of an evaluation; figures: those of how its logits agree with its codes."""
    linears = ", ".join(f"{count} {name}" for name, count in runtime["linears"].items()) or "none on codes"
    peak = runtime["peak_bytes"]
    memory = f"weights {console.size(runtime['weights_bytes'])}" + (
        "" if peak is None else f", peak {console.size(peak)}"
    )
    verdict = "within" if figures["logits_error"] <= figures["logits_bound"] else "BEYOND"
    console.table(
        f"{runtime['backend']} on {runtime['device']}; linears: {linears}; {memory}; logits {verdict} the bound",
        ("", "batch", "prompt, tokens/s", "new, tokens/s", ""),
        [
            *_rows("this model", runtime["speed"]),
            *_rows("original in bfloat16", runtime.get("reference_speed") or ()),
        ],
        right=(1, 2, 3),
    )


def _rows(name: str, speeds: Any) -> list[tuple[str, ...]]:
    return [
        (
            name,
            str(speed["batch"]),
            f"{speed['prefill_tokens_per_second']:,.0f}",
            f"{speed['decode_tokens_per_second']:,.1f}",
            "CUDA graph" if speed["cuda_graph"] else "",
        )
        for speed in speeds
    ]
