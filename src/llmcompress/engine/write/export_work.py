"""Export: other formats are written from the staged codes of a finished run, without calibrating again."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.write.publish import finish
from llmcompress.errors import PlanError
from llmcompress.recipe import parse
from llmcompress.store.staging import Staging


class Exported(NamedTuple):
    """What was written: its format, its directory, bytes of its weight files."""

    format: str
    output: Path
    nbytes: int


def export_work(work: Path, formats: Sequence[str], out: Path | None, overwrite: bool) -> list[Exported]:
    """Write each format. PlanError if the run is not finished."""
    try:
        identity = json.loads((work / "plan.json").read_text(encoding="utf-8"))
        place = json.loads((work / "place.json").read_text(encoding="utf-8"))
        data, model = {**identity["recipe"]}, Path(place["model"])
        dtype, batch = str(identity["compute_dtype"]), int(identity["batch"])
        run_of = {key: identity[key] for key in ("tokens", "statistics") if key in identity}
        calibration, trusted = place["calibration"], place["trust_remote_code"] is True
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError
    except (OSError, RecursionError, ValueError, KeyError, TypeError):
        raise PlanError(f"{work} is not a work directory", "give one that a run kept with --keep-work") from None
    stem = out or work.with_name(work.name.removesuffix(".work"))
    plans = []
    for name in formats:
        recipe = parse({**data, "output": {"format": name}}, f"recipe of {work}")
        target = stem if out is not None and len(formats) == 1 else stem.with_name(f"{stem.name}-{name}")
        options = Options(
            out=target,
            work=work,
            compute_dtype=dtype,
            batch=batch,
            overwrite=overwrite,
            keep_work=True,
            trust_remote_code=trusted,
        )
        plans.append(make_plan(recipe, model, options))
    done = []
    for plan in plans:
        with closing(Staging(work, {**plan.identity, **run_of})) as staged:
            missing = staged.missing(len(plan.layers))
            if missing:
                raise PlanError(
                    f"{work} lacks layer {missing[0]} of {len(plan.layers)}", "finish the run first: repeat its command"
                )
            finish(plan, staged, calibration)
        done.append(Exported(plan.format.name, plan.out, plan.estimate.output_bytes))
    return done
