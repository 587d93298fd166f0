"""Options that say how large a result is to be, for commands that choose widths or types by what each would lose."""

from pathlib import Path
from typing import Annotated, Any

import typer

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
