"""Commands made from presets (api/presets.py), such as `llmcompress nf4`."""

from typing import Annotated, Any

import typer

from llmcompress.api.presets import Preset
from llmcompress.cli import options as o

Format = Annotated[
    str | None,
    typer.Option("--format", help="Checkpoint format; see `llmcompress list formats`.", rich_help_panel=o.OUTPUT),
]


def options(preset: Preset) -> dict[str, tuple[Any, Any]]:
    """Options of a preset's command: name to (annotation, default)."""
    found: dict[str, tuple[Any, Any]] = {"model": (o.Model, ...), **o.fields_as_options(preset.fields), **o.RUN_OPTIONS}
    found["format_"] = (Format, None) if preset.beside else (o.Format, preset.format)
    if preset.calibrated is not None:
        found["calibration"] = (o.OptionalSource, None)
    return found | o.MEANS
