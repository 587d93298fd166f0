"""Options that say how large a result is to be, for commands that choose widths or types by what each would lose."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcompress.errors import RecipeError

if TYPE_CHECKING:
    from llmcompress.engine.budget.fit_to_size import Budget

PANEL = "Budget"


def options(of: str, kept: str) -> dict[str, tuple[Any, Any]]:
    """`bpw`, `size`, and `kept`: the file of what was measured, by that name. of: what the bits are of."""
    bits = Annotated[
        float | None, typer.Option("--bpw", help=f"Bits per weight of {of}, such as 4.5.", rich_help_panel=PANEL)
    ]
    size = Annotated[
        str | None,
        typer.Option(
            "--size",
            help="Size of all weight files, embeddings included: 90MB, 1.5GB (10^9 bytes).",
            rich_help_panel=PANEL,
        ),
    ]
    file = Annotated[
        Path | None,
        typer.Option(
            f"--{kept}",
            help="Keep what is measured in this file, or take it from there: no other size needs measuring.",
            rich_help_panel=PANEL,
        ),
    ]
    return {"bpw": (bits, None), "size": (size, None), kept: (file, None)}


def budget(values: Mapping[str, Any]) -> "Budget":
    """What `bpw` and `size` say; RecipeError where they say two things, or nothing that can be."""
    from llmcompress.engine.budget.fit_to_size import Budget

    size, bits = values["size"], values["bpw"]
    if size is not None and bits is not None:
        raise RecipeError("--size and --bpw both say how large the result is to be", "give one of them")
    if bits is not None:
        refuse_no_number("--bpw", bits, 4.5)
    return Budget(None if size is None else nbytes("--size", size), bits)


def refuse_no_number(option: str, value: float, usual: float) -> None:
    """RecipeError for bits, or a divergence, that nothing can have."""
    if not 0 < value <= 64:  # not for nan either
        raise RecipeError(f"{option} {value} is no number that it can be", f"write for example {option} {usual}")


def nbytes(option: str, text: str) -> int:
    """A size with its unit in bytes; without one it is in GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([kKMG]?B|)", text.strip())
    scale = {"": 1e9, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}.get(found[2].upper() if found else "?")
    if found is None or scale is None or float(found[1]) * scale > 1e18:
        raise RecipeError(f"{option} {text!r} is no size", f"write for example {option} 90MB")
    return int(float(found[1]) * scale)
