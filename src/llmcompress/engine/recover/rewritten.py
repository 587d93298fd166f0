"""A compressed model written anew: what was trained has other values, all else is as it was, to the byte."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import yaml
from torch import Tensor

from llmcompress import __version__
from llmcompress.engine.recover.factors import FACTORS, Factors
from llmcompress.engine.recover.recover_plan import RecoverPlan, paper
from llmcompress.engine.recover.recovered_file import pieces
from llmcompress.engine.recover.trained_parts import encoded
from llmcompress.engine.train.trained import Trained, TrainedMatrix, TrainedNorm, TrainedWeight
from llmcompress.formats.front_matter import front_matter
from llmcompress.significant import significant
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.output import OutputDirectory

_CARD, _REPORT, _MODELFILE = "README.md", "report.json", "Modelfile"
_MEASURED = ("loss", "tokens", "percdamp", "shrinkage", "rtn_ratio")  # of the scales as they were
_ROWS = 1024  # compared at once


def write_recovered(
    plan: RecoverPlan, trained: Mapping[str, Trained], out: OutputDirectory, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Write all files of the model; returns the report, with the `record` of what was done."""
    stored, factors = Checkpoint(plan.stored), Factors(plan)
    hashes = _write_weights(plan, trained, stored, out)
    for name, item in trained.items():
        if isinstance(item, TrainedNorm):
            factors.with_gains(name, item.learnt.exp(), item.offset)
    if factors.arrays:
        out.write_arrays(FACTORS, factors.arrays)
    if plan.gguf is None:
        _write_papers(plan, out, record)
    elif (modelfile := paper(plan.path, _MODELFILE)).is_file():
        _, _, rest = modelfile.read_text(encoding="utf-8").partition("\n")
        out.write_text(_MODELFILE, f"FROM ./{out.path.name}\n{rest}")
    linears = [
        _record(item, trained.get(f"{item['name']}.weight"), factors, stored)
        for item in (*plan.report["linears"], *_unrecorded(plan, trained))
    ]
    report = {key: value for key, value in plan.report.items() if key not in ("files", "sha256")}
    ledger = [*plan.report["ledger"], *plan.opened.ledger.as_json()]
    done = {"llmcompress": __version__, "linears": linears, "ledger": ledger, "tensors": hashes}
    return out.write_report({**report, **done, "recovery": dict(record)})


def _write_weights(
    plan: RecoverPlan, trained: Mapping[str, Trained], stored: Checkpoint, out: OutputDirectory
) -> dict[str, str]:
    """Write the files of the weights; SHA-256 (hex) of each tensor's bytes by its name."""
    if plan.gguf is not None:
        hashes: dict[str, str] = {}
        out.write_pieces(out.path.name, pieces(plan.gguf, trained, hashes))
        return hashes
    specs = [item.spec for item in plan.stored.tensors.values()]
    output = plan.report.get("recipe", {}).get("output")
    shard = output.get("shard_size") if isinstance(output, Mapping) else None
    return out.write_weights(specs, _tensors(plan, trained, stored), shard)


def _write_papers(plan: RecoverPlan, out: OutputDirectory, record: Mapping[str, Any]) -> None:
    """Copy what a directory holds beside weights; its card says what was done."""
    written = {*out.files, _REPORT, _CARD}
    for name in plan.report["files"]:
        if name not in written and not name.endswith((".safetensors", ".safetensors.index.json")):
            out.copy_file(plan.stored.path, name)
    card = plan.stored.path / _CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    out.write_text(_CARD, f"{_without_figures(text).rstrip()}\n\n{_said(record)}")


def _tensors(plan: RecoverPlan, trained: Mapping[str, Trained], stored: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files in order, what was trained as it is now."""
    made: dict[str, Tensor] = {}
    matrices = {item.module: item for item in trained.values() if isinstance(item, TrainedMatrix)}
    for name in stored.names():
        module = next((owner for owner in _modules_of(name) if owner in matrices), None)
        if module is not None:
            made |= encoded(plan, module, matrices.pop(module).coded())
        whole = trained.get(name)
        if isinstance(whole, TrainedNorm | TrainedWeight):
            made[name] = whole.value()
        yield name, made.pop(name) if name in made else stored.read(name)


def _modules_of(name: str) -> Iterator[str]:
    """The names of all modules that a tensor may belong to, the longest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _unrecorded(plan: RecoverPlan, trained: Mapping[str, Trained]) -> Iterator[dict[str, Any]]:
    """Records of trained matrices that the report has none of, since only what is around them was removed."""
    method = "depth" if "depth" in plan.report else "width"
    for ref in plan.opened.matrices.refs:
        if f"{ref.module}.weight" in trained and ref.module not in plan.records:
            shape = list(plan.own[f"{ref.module}.weight"].spec.shape)
            yield {
                "name": ref.module,
                "method": method,
                "grid": None,
                "shape": shape[::-1] if ref.linear.conv1d else shape,
                "permuted": False,
                "transposed": ref.linear.conv1d,
            }


def _record(record: Mapping[str, Any], trained: Trained | None, factors: Factors, stored: Checkpoint) -> dict[str, Any]:
    """The record of a matrix, with its error of now; without what was measured of its scales as they were.

    stored: the model as it was before, to which the error is where channels of the source are gone.
    """
    if not isinstance(trained, TrainedMatrix | TrainedWeight):
        return dict(record)
    name = f"{record['name']}.weight"
    kept = {**{key: value for key, value in record.items() if key not in _MEASURED}, "recovered": True}
    source = factors.source(name)
    if source is None and not factors.plan.reshaped:
        return kept
    before = stored.read(name).to(torch.float32) if source is None else source
    return {**kept, "relative_error": _relative_error(trained.value().to(torch.float32), before)}


def _relative_error(value: Tensor, source: Tensor) -> float:
    """||W' - W|| / ||W||, some rows at a time, to six digits."""
    missed, whole = 0.0, 0.0
    for mine, theirs in zip(torch.split(value, _ROWS), torch.split(source, _ROWS), strict=True):
        missed += float((mine - theirs).square().sum(dtype=torch.float64))
        whole += float(theirs.square().sum(dtype=torch.float64))
    return significant((missed / max(whole, 1e-60)) ** 0.5)


def _without_figures(card: str) -> str:
    """A model card without the figures of an evaluation, which are those of the model as it was."""
    _, _, rest = card.partition("\n---\n")
    matter = dict(front_matter(card))
    if matter.pop("model-index", None) is None:
        return card
    return f"---\n{yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)}---\n{rest}"


def _said(record: Mapping[str, Any]) -> str:
    """The section of the model card."""
    held = "; ".join(
        f"{name}: {item['kl_before']:.4g} before, {item['kl']:.4g} after" for name, item in record["held_back"].items()
    )
    scales = f"the scales of {record['matrices']} matrices"
    weights = f"the weights that stayed of {record['pruned']} matrices"
    parts = [*([scales] if record["matrices"] else []), *([weights] if record["pruned"] else [])]
    trained = " and ".join([*parts, f"the gains of {record['norms']} norms"])
    return (
        "## Recovery\n\n"
        f"{trained[0].upper()}{trained[1:]} were trained for {record['best_step']} steps towards the predictions of "
        f"the original; codes and zeros are as they were. KL divergence from the original on text held back ({held}).\n"
    )
