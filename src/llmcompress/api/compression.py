"""Plan a run, carry it out, export its codes: what the commands that compress do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress.api.quiet import quiet_libraries
from llmcompress.api.recipes import as_recipe
from llmcompress.api.results import Result, timed
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.process.ranks import refuse_several
from llmcompress.errors import PlanError
from llmcompress.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.engine.plan.plan import Plan
    from llmcompress.engine.write.export_work import Exported
    from llmcompress.ledger import LedgerEntry
    from llmcompress.solve.column_sweep import Sweeper
    from llmcompress.store.output import OutputDirectory
    from llmcompress.workers import Workers

RecipeLike = Recipe | Mapping[str, Any] | str | Path
Stop = Callable[[int], bool]


def compress(
    model: str | Path,
    recipe: RecipeLike | None = None,
    output: str | Path | None = None,
    *,
    method: str | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
    **settings: Any,
) -> Result:
    """Compress a model directory and write the result beside it, or to `output`: `plan`, then `run`.

    A call that was stopped or interrupted goes on after its last finished layer when it is repeated.

    recipe: a `Recipe`, its plain data, a YAML file, or a name of `llmcompress recipe list`. method: in place of a
    recipe, the name of a command that compresses: "gptq", "rtn", "awq", "nf4", "sparsegpt", "gguf" and so on. settings:
    that command's options, named as on the command line with `_` for `-`: `bits`, `group_size`, `calibration`,
    `samples`, `length`, `format`; `set` and `tensor_type` are mappings by pattern, sizes are bytes. A recipe takes
    `format`, `shard_size`, `base_model` and `license`. options: what the run may use, and whether it may overwrite.
    progress: told of layers and matrices. stop: asked before every layer, with the number of layers that this call has
    finished; when it returns true, StoppedError is raised. Raises LlmcompressError: RecipeError, PlanError,
    CheckpointError or CalibrationError before anything is computed, RunError or StoppedError later.

        >>> result = llmcompress.compress("model", method="gptq", bits=4, samples=8, length=128, output="model-w4")
        >>> result.nbytes < result.report["source"]["bytes"]
        True
    """
    refuse_several("compress() of Python")
    from llmcompress.engine.plan.make_plan import make_plan

    planned = make_plan(as_recipe(recipe, method, settings), Path(model), placed(options, output))
    return run(planned, progress=progress, stop=stop)


def plan(
    model: str | Path,
    recipe: RecipeLike | None = None,
    output: str | Path | None = None,
    *,
    method: str | None = None,
    options: Options | None = None,
    **settings: Any,
) -> Plan:
    """What `compress` with the same arguments would do, from headers alone: no tensor is read, nothing is written.

    The plan has `recipe`, `out` and `work` (paths), `layers` (the matrices of each layer: `module`, `grid`, `method`),
    `tensors` (name, dtype and shape of all that is written), `estimate` (exact `output_bytes`; `memory_bytes`,
    `work_bytes`, `passes`, `bits_per_weight` of all tensors) and `ledger`. Raises LlmcompressError for what `compress`
    would refuse.

        >>> plan = llmcompress.plan("model", method="rtn", bits=8)
        >>> plan.estimate.output_bytes < plan.estimate.source_bytes
        True
    """
    from llmcompress.engine.plan.make_plan import make_plan
    from llmcompress.engine.run.start import refuse_start

    chosen = as_recipe(recipe, method, settings)
    planned = make_plan(chosen, Path(model), placed(options, output))
    with quiet_libraries():
        refuse_start(planned)
    return planned


def run(
    plan: Plan,
    *,
    progress: Progress | None = None,
    stop: Stop | None = None,
    timings: str | Path | None = None,
) -> Result:
    """Carry a plan out. progress, stop, errors: see `compress`.

    timings: a file to which time and memory of each layer are appended, as lines of JSON, for `llmcompress report`.

        >>> result = llmcompress.run(llmcompress.plan("model", "rtn-w8", "model-w8"))
        >>> result.output
        PosixPath('model-w8')
    """
    refuse_several("run() of Python")
    return carried_out(plan, progress, stop, timings)


def carried_out(
    plan: Plan,
    progress: Progress | None = None,
    stop: Stop | None = None,
    timings: str | Path | None = None,
    tokens: Tensor | None = None,
    workers: Workers | None = None,
    say: Callable[[str], None] = lambda line: None,
    judge: Callable[[Sequence[LedgerEntry]], None] = lambda entries: None,
    output: OutputDirectory | None = None,
) -> Result:
    """The result of a plan that one process carries out, or several.

    tokens [samples, length]: of the calibration, where they are drawn already. workers: the ranks that share the run;
    None for this process alone. say: told why a GPU does not use a kernel of its own. judge: see `execute.run`. output:
    the plan's, where it is claimed already.
    """
    from llmcompress.engine import execute
    from llmcompress.engine.write.timings import Timings, refuse_place
    from llmcompress.workers import SERIAL

    watch = progress or Progress()
    timer = None
    if timings is not None:
        refuse_place(Path(timings), plan)
        timer = Timings(Path(timings), plan, watch)

    def work() -> dict[str, Any]:
        with quiet_libraries():
            stop_when = stop or (lambda finished: False)
            ranks, sweeper = workers or SERIAL, _sweeper(plan, say)
            report = execute.run(plan, timer or watch, stop_when, tokens, ranks, sweeper, judge, output)
        if timer is not None:
            timer.end()
        return report

    return timed(plan.out, work)


def export(
    work: str | Path, formats: str | Sequence[str], output: str | Path | None = None, *, overwrite: bool = False
) -> list[Exported]:
    """Write other formats without computing anything again.

    work: the work directory that a run has kept, or a quantised checkpoint whose config.json tells its grids
    (compressed-tensors, ModelOpt, MLX, GPTQ without activation order, AWQ, auto-round). output: the directory to write;
    the formats' names are appended where there are several. PlanError if the run is not finished, the directory is
    neither, or a format cannot hold the codes or scales.

        >>> from pathlib import Path
        >>> options = llmcompress.Options(work=Path("work"), keep_work=True)
        >>> result = llmcompress.compress("model", "rtn-w8", "model-w8", options=options)
        >>> [(item.format, item.output) for item in llmcompress.export("work", "gptq", "model-gptq")]
        [('gptq', PosixPath('model-gptq'))]
    """
    from llmcompress.engine.export_checkpoint import export_checkpoint
    from llmcompress.engine.write.export_work import export_work

    names = [formats] if isinstance(formats, str) else list(dict.fromkeys(formats))
    if Path(work).is_file():
        raise PlanError(f"{work} is a file", "give a work directory, or the directory of a quantised checkpoint")
    write = export_checkpoint if (Path(work) / "config.json").is_file() else export_work
    with quiet_libraries():
        return write(Path(work), names, None if output is None else Path(output), overwrite)


def placed(options: Options | None, output: str | Path | None) -> Options:
    """The options with `output` as their place, if it is given."""
    options = options or Options()
    return options if output is None else replace(options, out=Path(output))


def _sweeper(plan: Plan, say: Callable[[str], None]) -> Sweeper | None:
    """The kernel that decides blocks of columns, where the run has a GPU that can run it."""
    if not plan.resources.gpu or not any(matrix.inverts for matrix in plan.matrices):
        return None
    from llmcompress.engine.process.ranks import device_of
    from llmcompress.kernels.gpu_sweep import gpu_sweeper

    return gpu_sweeper(device_of(plan.options.device), say)
