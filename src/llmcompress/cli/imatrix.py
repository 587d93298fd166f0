"""`imatrix` and `imatrix-merge`: importance matrices, for `gguf --imatrix` and for llama.cpp."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcompress.api.quiet import quiet_libraries
from llmcompress.api.settings import text_of
from llmcompress.api.steps import watched
from llmcompress.cli import console, watching
from llmcompress.cli import options as flags
from llmcompress.cli.log import log
from llmcompress.cli.stopping import Stop
from llmcompress.errors import PlanError

if TYPE_CHECKING:
    from llmcompress.formats.gguf.imatrix import Imatrix

_NOTHING_KEPT = "nothing is kept of an importance matrix under way; the same command begins again"

Out = Annotated[Path, typer.Option("--output", "-o", help="File to write.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the importance matrix that is there.")]
Legacy = Annotated[bool, typer.Option("--legacy", help="The kind of file (.dat) that llama.cpp read before 2025.")]
Files = Annotated[list[Path], typer.Argument(help="Importance matrices of one model.", show_default=False)]


def register(app: typer.Typer) -> None:
    app.command("imatrix", rich_help_panel="Look")(measure)
    app.command("imatrix-merge", rich_help_panel="Look")(merge)


def measure(
    model: flags.Model,
    out: Out,
    calibration: flags.Source = "default",
    field: flags.Field = None,
    samples: flags.Samples = 128,
    length: flags.Length = 512,
    seed: flags.Seed = 0,
    legacy: Legacy = False,
    overwrite: Overwrite = False,
    adapter: flags.Adapter = None,
    device: flags.Device = "auto",
    compute_dtype: flags.ComputeDtype = "auto",
    batch: flags.Batch = None,
    threads: flags.Threads = None,
    trust_remote_code: flags.Trust = False,
    deadline: flags.Deadline = None,
    json_: flags.Json = False,
    log_format: flags.LogFormat = "text",
    quiet: flags.Quiet = False,
) -> None:
    """Measure how much each input of every matrix matters: the sums of its squares over text, as llama-imatrix does."""
    with watching.reading(quiet or json_):
        from llmcompress.engine.plan.run_options import Options
        from llmcompress.engine.run.measure_imatrix import measure_imatrix
        from llmcompress.formats.gguf.imatrix_file import refuse_place, write_imatrix, write_legacy
        from llmcompress.ledger import Ledger
        from llmcompress.store.unfinished import claimed

    given = {"calibration": calibration, "field": field, "samples": samples, "length": length, "seed": seed}
    text = text_of(given)
    refuse_place(out, overwrite)
    resources = Options(
        device=device,
        compute_dtype=compute_dtype,
        batch=batch,
        threads=threads,
        trust_remote_code=trust_remote_code,
        adapter=adapter,
    )
    ledger = Ledger()
    quiet_steps = quiet or (json_ and not log.active)
    with claimed(out) as claim:
        with quiet_libraries(), watching.Steps("layers", quiet_steps) as steps:
            watch = watched(steps.at, Stop(deadline), _NOTHING_KEPT)
            found = measure_imatrix(model, text, claim, resources, ledger, watch)
        (write_legacy if legacy else write_imatrix)(out, found, overwrite, claim)
    if log.active or not (quiet or json_):
        console.ledger(ledger.as_json())
    _tell(out, found, json_, ledger=ledger.as_json())


def merge(
    files: Files,
    out: Out,
    legacy: Legacy = False,
    overwrite: Overwrite = False,
    json_: flags.Json = False,
    log_format: flags.LogFormat = "text",
) -> None:
    """Add up importance matrices of one model: that of all their texts together."""
    from llmcompress.formats.gguf import imatrix
    from llmcompress.formats.gguf.imatrix_file import read_imatrix, refuse_place, write_imatrix, write_legacy

    if len(files) < 2:
        raise PlanError("there is nothing to merge with a single file", "give two or more")
    refuse_place(out, overwrite)
    found = imatrix.merge([read_imatrix(file) for file in files])
    (write_legacy if legacy else write_imatrix)(out, found, overwrite)
    _tell(out, found, json_)


def _tell(out: Path, found: "Imatrix", as_json: bool, **more: Any) -> None:
    chunks, size, entries = found.chunk_count, found.chunk_size, len(found.entries)
    if as_json:
        console.print_json({"output": str(out), "entries": entries, "chunks": chunks, "chunk_size": size, **more})
    else:
        console.say(f"{out}: {entries} tensors, {chunks:,} windows of {size:,} tokens")
        console.next_step("gguf", "MODEL", "--type", "Q4_K_M", "--imatrix", out)
