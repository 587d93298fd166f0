"""Export: other formats are written from the staged codes of a finished run, without calibrating again."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.write.publish import finish
from llmcompress.errors import PlanError
from llmcompress.ledger import LedgerEntry
from llmcompress.recipe import parse
from llmcompress.store.output_file import output_of
from llmcompress.store.staging import Staging, kept_work


class Exported(NamedTuple):
    """What was written: its format, its directory, bytes of its weight files, and who does not load it."""

    format: str
    output: Path
    nbytes: int
    engines: tuple[LedgerEntry, ...]

    @classmethod
    def of(cls, plan: Plan) -> "Exported":
        """What a plan that was carried out has written."""
        engines = tuple(entry for entry in plan.ledger if entry.kind == "engine")
        return cls(plan.format.name, plan.out, plan.estimate.output_bytes, engines)


def export_work(work: Path, formats: Sequence[str], out: Path | None, overwrite: bool) -> list[Exported]:
    """Write each format. PlanError if the run is not finished."""
    try:
        identity, place = kept_work(work)
        data, model = {**identity["recipe"]}, Path(place["model"])
        dtype, batch = str(identity["compute_dtype"]), int(identity["batch"])
        run_of: dict[str, Any] = {key: identity[key] for key in ("tokens", "statistics") if key in identity}
        adapter = place.get("adapter")
        origin = dict(place.get("origin", {}))
        calibration, trusted = place["calibration"], place["trust_remote_code"] is True
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise PlanError(
            f"{work} is not a work directory", "give one that a run kept with --keep-work, or a checkpoint"
        ) from None
    stem = out or work.with_name(work.name.removesuffix(".work"))
    plans = []
    for name in formats:
        recipe = parse({**data, "output": {"format": name, **origin}}, f"recipe of {work}")
        target = stem if out is not None and len(formats) == 1 else stem.with_name(f"{stem.name}-{name}")
        options = Options(
            out=target,
            work=work,
            compute_dtype=dtype,
            batch=batch,
            overwrite=overwrite,
            keep_work=True,
            trust_remote_code=trusted,
            adapter=None if adapter is None else Path(adapter),
        )
        plans.append(make_plan(recipe, model, options))
    done = []
    with ExitStack() as stack:
        outputs = [stack.enter_context(output_of(plan.out, plan.format.name, overwrite)) for plan in plans]
        for plan, output in zip(plans, outputs, strict=True):
            staged = stack.enter_context(closing(Staging(work, {**plan.identity, **run_of})))
            missing = staged.missing(len(plan.sections))
            if missing:
                raise PlanError(
                    f"{work} lacks layer {missing[0]} of {len(plan.sections)}",
                    "finish the run first: repeat its command",
                )
            finish(plan, staged, calibration, output)
            staged.close()
            done.append(Exported.of(plan))
    return done
