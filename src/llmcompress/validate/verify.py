"""Proof that a written directory is what it claims to be, by a reader that shares no code with the writer.

What is proved, in words:

- files: headers, index and lengths agree; no gap, no overlap, no stray weight file.
- report: it is, to the byte, what its digest was made of.
- directory: every file is there with the SHA-256 that report.json recorded, nothing else is. A changed model card
  (README.md) is a warning, and so is what hubs add to a download.
- config: the keys engines need are there, and they say of every linear what its tensors say.
- plan: config.json and the headers pass the checks by which a plan refuses a model.
- hashes: every tensor has the SHA-256 that report.json recorded when it was written.
- finite, matrices: every value is finite; scales are finite and not zero, padding bits are zero, zero points are the
  middle where the grid is symmetric, group indices are in range, shapes are those of the grid. A decoded value then
  lies on its group's grid, since scale * (code - zero point) is how it is made. Decoded weights (`dense`) have at most
  2^bits values in a group. Fixed scales of inputs are positive, and the same for linears that engines run as one.
- sparsity: matrices that were pruned have as many zeros as report.json recorded, in the recorded pattern.
- cache: every attention has scales of keys and values, if config.json speaks of them, as report.json recorded them.
- source: every tensor of the source is there byte for byte, or quantised, or a tied head left out; nothing else is. Of
  a narrower feed-forward, what writes channels holds those of the source, and what reads them was fitted anew. Values
  of config.json are those of the source, but for what the run changes; tokenizer and other side files its bytes. A
  source that is quantised itself counts as its decoded values (`decoded_source`).
- bound: of every matrix, the relative error ||W - W'|| / ||W|| (Frobenius) is the one that report.json recorded, to
  0.1%, and below 1, which is what zeroing the matrix would give. Decoded weights are rounded once more to their stored
  type, which may add or hide as much as the rounding can be. For method rtn without pruning and recovery, element by
  element, |w - w'| <= half a step + what lies outside the range of the grid, since rounding takes the nearest code.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmcompress.validate.config_checks import config_wrongs
from llmcompress.validate.declared_schemes import format_of, missing_parts
from llmcompress.validate.directory import ROWS, Directory
from llmcompress.validate.draft_checks import DRAFTS, draft_checks, draft_form
from llmcompress.validate.findings import Check, guarded, guarded_list, summary
from llmcompress.validate.float4 import StoredFloat4
from llmcompress.validate.kv_scale_checks import cache_scales, cache_wrongs
from llmcompress.validate.matrices import AffineMatrix, quantised_modules, read_matrix
from llmcompress.validate.matrix import ZERO_SCALES, StoredMatrix
from llmcompress.validate.plan_checks import plan_wrongs
from llmcompress.validate.published import REPORT, directory_checks, report_edits
from llmcompress.validate.source_checks import against_source
from llmcompress.validate.sparsity import sparsity
from llmcompress.validate.stored import DamageError, read_json, read_tensors

_ADAPTER = "adapter_config.json"
_KEYS = ("format", "linears", "tensors")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_GRID = re.compile(r"int(\d)-(?:row|g(\d+))-(?:sym|asym)|fp8-row")


def verify(out: Path, source: Path | None = None, adapter: Path | None = None) -> list[Check]:
    """Check everything in `out`, and compare `out` with `source`, the model it was made from, if given.

    adapter: what was merged into the source.

    `out` is good if every check that is not a warning is ok. Never raises for damage in `out`.
    """
    is_adapter = (out / _ADAPTER).is_file() and not (out / "config.json").exists()
    try:
        tensors = read_tensors(out)
        config = read_json(out / (_ADAPTER if is_adapter else "config.json"))
        form = "lora" if is_adapter else str(draft_form(config) or format_of(config))
    except (DamageError, OSError) as error:
        return [Check("files", False, str(error))]
    checks = [
        Check("files", True, f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors.values())} bytes")
    ]
    try:
        report = read_json(out / REPORT)
        unusable = _report_wrongs(report, form)
        edited = guarded_list(lambda: report_edits((out / REPORT).read_bytes()))
        checks.append(summary("report", unusable + edited, "names this format and every linear, and is as written"))
        report = {} if unusable else report
    except DamageError as error:
        report = {}
        checks.append(Check("report", False, str(error)))
    checks += directory_checks(out, report)
    directory = Directory(out, config, form, tensors, report)
    checks.append(guarded("hashes", lambda: _hashes(directory)))
    infinite = [f"{name} holds values that are not finite" for name, tensor in tensors.items() if not tensor.finite()]
    checks.append(summary("finite", infinite, "every value"))
    if is_adapter:  # what it corrects is another directory's, and for `eval --adapter` to judge
        return checks
    if form in DRAFTS:
        return checks + draft_checks(config, tensors, report, source)
    checks.append(guarded("config", lambda: summary("config", config_wrongs(directory), "keys and tensors agree")))
    checks.append(guarded("plan", lambda: summary("plan", plan_wrongs(out), "config.json fits the headers")))
    matrices: dict[str, StoredMatrix] = {}
    wrong = _read_all(directory, matrices)
    if form == "dense":
        wrong += guarded_list(lambda: _too_many_values(directory))
    wrong += _unlike_scales(matrices)
    checks.append(summary("matrices", wrong, f"{len(matrices) or len(directory.records)} on their grids"))
    checks.append(_fused(directory, matrices))
    if (zeros := sparsity(directory, matrices)) is not None:
        checks.append(zeros)
    settings = config.get("quantization_config")
    if isinstance(settings, dict) and (settings.get("kv_cache_scheme") is not None or cache_scales(tensors)):
        right = f"{len(cache_scales(tensors))} scales of keys and values"
        checks.append(guarded("cache", lambda: summary("cache", cache_wrongs(settings, tensors, report), right)))
    if source is not None:
        checks += against_source(directory, matrices, source, adapter)
    return checks


def passed(checks: Sequence[Check]) -> bool:
    return all(check.ok or check.warning for check in checks)


def _report_wrongs(report: Mapping[str, Any], form: str) -> list[str]:
    wrong = [
        f"report.json has no {key!r}"
        for key in _KEYS
        if key not in report and (key != "linears" or form not in ("lora", *DRAFTS))
    ]
    if report.get("format", form) != form:
        wrong.append(f"report.json says format {report['format']}, config.json says {form}")
    linears = report.get("linears", [])
    if not isinstance(linears, list) or not all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("grid", 0), str | None)
        for item in linears
    ):
        return [*wrong, "report.json has linears without name or grid"]
    return wrong


def _hashes(directory: Directory) -> Check:
    recorded = directory.report.get("tensors")
    if not isinstance(recorded, dict):
        return Check("hashes", False, "report.json records none")
    wrong = [f"{name} is not in report.json" for name in directory.tensors.keys() - recorded.keys()]
    wrong += [f"{name} is in report.json and in no file" for name in recorded.keys() - directory.tensors.keys()]
    for name, tensor in directory.tensors.items():
        if name in recorded and tensor.sha256() != recorded[name]:
            wrong.append(f"{name} is not what was written")
    return summary("hashes", sorted(wrong), "every tensor has the recorded SHA-256")


def _read_all(directory: Directory, matrices: dict[str, StoredMatrix]) -> list[str]:
    """Decode every quantised matrix into `matrices`; returns the faults."""
    wrong: list[str] = []
    kept = {name for name, record in directory.records.items() if record.get("method") == "recoded"}
    for module, parts in quantised_modules(directory.tensors, directory.form).items():

        def look(module: str = module, parts: set[str] = parts) -> list[str]:
            if missing := missing_parts(module, parts, directory.config):
                return [f"{module} has no {', '.join(missing)}"]
            matrices[module], found = read_matrix(module, directory.tensors, directory.config)
            # a source may have them where all weights are zero, and its codes were kept
            return [fault for fault in found if not (module in kept and fault.endswith(ZERO_SCALES))]

        wrong += guarded_list(look)
    return wrong


def _unlike_scales(matrices: Mapping[str, StoredMatrix]) -> list[str]:
    """Scales that engines keep only one of where they fuse linears, of the inputs or global ones, and that differ."""
    wrong = []
    for parent in dict.fromkeys(module.rpartition(".")[0] for module in matrices):
        for leaves in _FUSED:
            found = [matrix for leaf in leaves if (matrix := matrices.get(f"{parent}.{leaf}")) is not None]
            names = ", ".join(matrix.module for matrix in found)
            scales = {matrix.input_scale for matrix in found if isinstance(matrix, AffineMatrix)}
            if len(scales - {None}) > 1:
                wrong.append(f"{names} have different scales of one input")
            pairs = {(matrix.divisor, matrix.input_divisor) for matrix in found if isinstance(matrix, StoredFloat4)}
            if len(pairs) > 1:
                wrong.append(f"{names} have different global scales")
    return wrong


def _fused(directory: Directory, matrices: Mapping[str, StoredMatrix]) -> Check:
    """Whether linears that vLLM and SGLang fuse share one scheme, which fusing needs."""
    wrong = []
    for parent in sorted({module.rpartition(".")[0] for module in matrices}):
        for leaves in _FUSED:
            members = [f"{parent}.{leaf}" for leaf in leaves]
            held = [name for name in members if name in matrices or f"{name}.weight" in directory.tensors]
            if len({matrices[name].scheme if name in matrices else None for name in held}) > 1:
                wrong.append(f"{', '.join(held)} are not on one grid")
    check = summary("fused", wrong, "linears that engines fuse share a grid")
    return Check(check.name, check.ok, check.detail, warning=True)


def _too_many_values(directory: Directory) -> list[str]:
    """Modules of decoded weights with a group that holds more different values than the grid has.

    Groups in activation order are unknown here: then a whole row is counted, with the values of all its groups.
    """
    wrong = []
    for module, record in directory.records.items():
        tensor = directory.tensors.get(f"{module}.weight")
        found = _GRID.fullmatch(str(record["grid"]))
        if tensor is None or found is None:
            continue
        weight = tensor.floats(transposed=directory.transposed(record, tensor, tensor))
        size, levels = int(found[2] or weight.shape[1]), 1 << int(found[1]) if found[1] else 253
        if record.get("permuted", record.get("method") != "rtn"):
            size, levels = weight.shape[1], levels * (weight.shape[1] // size)
        for start in range(0, weight.shape[0], ROWS):
            values = np.sort(weight[start : start + ROWS].reshape(-1, size), axis=1)
            if int((np.diff(values, axis=1) != 0).sum(1).max(initial=0)) >= levels:
                wrong.append(f"{module} has groups of more than {levels} values")
                break
    return wrong
