"""Publishing: staged codes become an output directory or file, which appears whole or not at all."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmcompress import __version__
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.resources import usual_threads
from llmcompress.engine.run.transformed import fold_section, open_transformed
from llmcompress.engine.write.gguf_writer import write_gguf
from llmcompress.engine.write.kv_scales import kv_scale_record
from llmcompress.engine.write.run_report import build_report
from llmcompress.engine.write.safetensors_writer import write_safetensors
from llmcompress.errors import one_line
from llmcompress.formats.card import model_card
from llmcompress.formats.front_matter import beginning_of_readme
from llmcompress.grids.ggml import gguf_types
from llmcompress.ledger import Ledger, LedgerEntry
from llmcompress.methods.base import Method
from llmcompress.pruners.base import Pruner
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.output import OutputDirectory
from llmcompress.store.staging import Staging
from llmcompress.transforms.base import Transform
from llmcompress.workers import SERIAL, Workers

Judge = Callable[[Sequence[LedgerEntry]], None]

_WRITERS = {"safetensors": write_safetensors, "gguf": write_gguf}  # by the kind of output of a plan


def write_output(
    plan: Plan,
    checkpoint: Checkpoint,
    staged: Staging,
    records: dict[str, list[dict[str, Any]]],
    ledger: Ledger,
    calibration: dict[str, Any] | None,
    workers: Workers,
    out: OutputDirectory,
) -> dict[str, Any]:
    """Write weights, configs, side files, recipe, report and model card; the report.

    records: lists of what is known of matrices, scaled sites and recovered layers. workers: threads that encode.
    """
    hashes = _WRITERS[plan.output_kind](plan, checkpoint, staged, out, workers)
    if isinstance(checkpoint, FoldedCheckpoint) and (factors := checkpoint.scales()):
        out.write_arrays("transforms.npz", factors)
    result = build_report(plan, records, ledger, calibration, hashes, kv_scale_record(plan, staged))
    for name, changes in plan.format.config(plan.entries, plan.headers.config).items():
        content = {**plan.headers.whole_config, **changes} if name == "config.json" else changes
        out.write_json(name, content)
    out.write_text("llmcompress.yaml", plan.recipe.as_yaml())
    if plan.modelfile is not None:
        out.write_text("Modelfile", plan.modelfile)
    out.write_text("README.md", model_card(model_card_facts(plan, result)))
    result = out.write_report(result)
    out.commit()
    return result


def model_card_facts(plan: Plan, result: dict[str, Any]) -> dict[str, Any]:
    """The facts of the model card, from the plan and the finished report."""
    linears = result["linears"]
    return {
        "name": _title(plan),
        "format": plan.format.name,
        "version": __version__,
        "config": plan.headers.config,
        "source_readme": beginning_of_readme(plan.headers.path / "README.md"),
        "base_model": plan.recipe.output.base_model,
        "license": plan.recipe.output.license,
        "grids": dict(sorted(Counter(item["grid"] for item in linears if item["grid"]).items())),
        "bits": _bits(plan),
        "inputs": min((entry.inputs.bits for entry in plan.entries if entry.inputs is not None), default=16),
        "methods": [
            *(step.name for step in plan.recipe.steps if not isinstance(step, Method)),
            *dict.fromkeys(item["method"] for item in linears),
        ],
        **({"file": plan.files[0].name} if plan.files else {}),
        **({} if plan.headers.merged is None else {"adapter": plan.headers.merged.sha256}),
        "figures": _figures(plan, [item["relative_error"] for item in linears]),
        "notes": [entry["why"] for entry in result["ledger"] if entry["kind"] == "engine"],
        "unquantised": [entry["subject"] for entry in result["ledger"] if entry["kind"] == "unquantised"],
        "recipe": plan.recipe.as_yaml(),
        **({} if result["calibration"] is None else {"calibration": _calibration_facts(plan, result["calibration"])}),
    }


def _bits(plan: Plan) -> list[int]:
    """The widths of codes in bits; block types of GGUF have names instead."""
    return sorted({entry.grid.bits for entry in plan.entries if entry.grid and entry.grid.whole_width})


def _figures(plan: Plan, errors: Sequence[float]) -> dict[str, str]:
    cost, quantised = plan.estimate, plan.estimate.bits_per_quantised_weight
    return {
        "bytes of weights": f"{cost.output_bytes:,}",
        "share of the source": f"{cost.output_bytes / cost.source_bytes:.1%}",
        "bits per weight": f"{cost.bits_per_weight:.3f}",
        **({} if quantised is None else {"bits per quantised weight": f"{quantised:.3f}"}),
        "mean relative error of a matrix": f"{sum(errors) / max(len(errors), 1):.4f}",
    }


def _calibration_facts(plan: Plan, calibration: Mapping[str, Any]) -> dict[str, str]:
    source = plan.recipe.calibration.source
    return {
        "source": source if source in ("default", "self") else "a text of the user's",
        "windows": f"{calibration['samples']} of {calibration['length']} tokens",
        "sha256 of the tokens": calibration["sha256"],
    }


def _title(plan: Plan) -> str:
    """The title of the model card: the model's name and what was done to it."""
    steps = " ".join(_said(step) for step in plan.recipe.steps)
    return f"{model_title(plan.headers, plan.recipe.output.base_model)} {steps} ({plan.format.name})"


def model_title(headers: ModelHeaders, base_model: str | None = None) -> str:
    """The name of a model: as the user says, as its config says, or that of its directory."""
    named = base_model or str(headers.config.get("_name_or_path") or "")
    return one_line(named.rstrip("/").rpartition("/")[2] or headers.name)


def _said(step: Method | Pruner | Transform) -> str:
    if isinstance(step, Transform):
        return step.name
    if isinstance(step, Pruner):
        return f"{step.name} {step.label}"
    return f"{step.name} {types.type if (types := gguf_types(step)) else step.label}"


def finish(
    plan: Plan,
    staged: Staging,
    calibration: dict[str, Any] | None,
    out: OutputDirectory,
    judge: Judge = lambda entries: None,
) -> dict[str, Any]:
    """Write the claimed output of a run whose sections are all staged, and return the report.

    judge: sees the whole ledger before anything is written, and may raise.
    """
    ledger = Ledger(plan.ledger)
    linears: list[dict[str, Any]] = []
    sites: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []  # that were recovered
    checkpoint = open_transformed(plan)
    for number in range(len(plan.sections)):
        records = staged.records(number)
        fold_section(plan, checkpoint, number, staged)
        linears += records["linears"]
        sites += records.get("sites", [])
        layers += [records["recovery"]] if "recovery" in records else []
        ledger.extend(LedgerEntry(**entry) for entry in records["ledger"])
    judge(ledger.entries)
    count = (plan.options.threads or usual_threads()) if plan.resources.gpu else plan.resources.threads
    known = {"linears": linears, "sites": sites, **({"recovered_layers": layers} if layers else {})}
    with SERIAL.with_threads(count) as workers:  # packing is for processors
        return write_output(plan, checkpoint, staged, known, ledger, calibration, workers, out)
