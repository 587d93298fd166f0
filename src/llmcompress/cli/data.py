"""`calib`: calibration windows as a file of their own."""

from pathlib import Path
from typing import Annotated

import typer

from llmcompress.api.settings import text_of
from llmcompress.cli import console
from llmcompress.cli import options as flags


def register(app: typer.Typer) -> None:
    calib = typer.Typer(no_args_is_help=True, help="Prepare calibration windows.")
    calib.command("pack")(pack)
    app.add_typer(calib, name="calib", rich_help_panel="Look")


def pack(
    model: flags.Model,
    out: Annotated[Path, typer.Option("--output", "-o", help="File to write (.safetensors).", show_default=False)],
    calibration: flags.Source = "default",
    field: flags.Field = None,
    samples: flags.Samples = 128,
    length: flags.Length = 512,
    seed: flags.Seed = 0,
    trust_remote_code: flags.Trust = False,
    json_: flags.Json = False,
    log_format: flags.LogFormat = "text",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace windows that are there.")] = False,
) -> None:
    """Tokenise with a model's tokenizer and write exactly the windows a run would use, for --calibration FILE."""
    from llmcompress.calib.base import fingerprint
    from llmcompress.calib.pack import refuse_place, save
    from llmcompress.engine.run.tokens import tokens_for

    given = {"calibration": calibration, "field": field, "samples": samples, "length": length, "seed": seed}
    text = text_of(given)
    refuse_place(out, overwrite)
    tokens = tokens_for(text, model, "float32", trust_remote_code)
    save(tokens, out)
    facts = {"path": str(out), "samples": tokens.shape[0], "length": tokens.shape[1], "sha256": fingerprint(tokens)}
    if json_:
        console.print_json(facts)
    else:
        console.say(f"{out}: {facts['samples']} windows of {facts['length']} tokens, sha256 {facts['sha256']}")
        console.next_step("gptq", model, "--calibration", out, "--samples", samples, "--length", length)
