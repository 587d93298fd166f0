"""Options that say how large a result is to be, for commands that choose widths or types by what each would lose."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

PANEL = "Budget"

Kl = Annotated[
    float | None,
    typer.Option(
        "--kl",
        help="The smallest result whose expected KL divergence is at most this, in nats per token; with --size or "
        "--bpw, within that.",
        rich_help_panel=PANEL,
    ),
]


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


def label(values: Mapping[str, Any]) -> str:
    """What a budget is called in file names: '4.5bpw', '0.09GB', 'kl0.05'."""
    from llmcompress.api.fitting import budget_of

    wanted = budget_of(values["size"], values["bpw"])
    if wanted.nbytes is not None:
        return f"{wanted.nbytes / 1e9:g}GB"
    return f"{wanted.bits:g}bpw" if wanted.bits is not None else f"kl{values['kl']:g}"
