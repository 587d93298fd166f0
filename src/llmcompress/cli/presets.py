"""Commands made from presets (api/presets.py), such as `llmcompress nf4`."""

from typing import Annotated, Any

import typer

from llmcompress.api.presets import Preset
from llmcompress.cli import options as flags

Format = Annotated[
    str | None,
    typer.Option("--format", help="Checkpoint format; see `llmcompress list formats`.", rich_help_panel=flags.OUTPUT),
]


def options(preset: Preset) -> dict[str, tuple[Any, Any]]:
    """Options of a preset's command: name to (annotation, default)."""
    found: dict[str, tuple[Any, Any]] = {
        "model": (flags.Model, ...),
        **flags.fields_as_options(preset.fields),
        **flags.RUN_OPTIONS,
    }
    found["format_"] = (Format, None) if preset.beside else (flags.Format, preset.format)
    if preset.calibrated is not None:
        found["calibration"] = (flags.OptionalSource, None)
    return found | flags.RESOURCE_OPTIONS
