"""Proof that a written directory is what it claims to be, by a reader that shares no code with the writer.

What is proved, in words:

- files: headers, index and lengths agree; no gap, no overlap, no stray weight file.
- config: the keys engines need are there, and they say of every linear what its tensors say.
- hashes: every tensor has the SHA-256 that report.json recorded when it was written.
- finite, matrices: every value is finite; scales are finite and not zero, padding bits are zero, zero points are the
  middle where the grid is symmetric, group indices are in range, shapes are those of the grid. A decoded value then
  lies on its group's grid, since scale * (code - zero point) is how it is made. Decoded weights (`dense`) have at most
  2^bits values in a group.
- source: every tensor of the source is there byte for byte, or quantised, or a tied head left out; nothing else is.
- bound: of every matrix, the relative error ||W - W'|| / ||W|| (Frobenius) is the one that report.json recorded, to
  0.1%, and below 1, which is what zeroing the matrix would give. Decoded weights are rounded once more to their stored
  type, which may add or hide as much as the rounding can be. For method rtn, element by element,
  |w - w'| <= |scale| / 2 + what lies outside the range of the grid, since rounding takes the nearest code.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmcompress.errors import LlmcompressError
from llmcompress.validate.matrices import (
    PARTS,
    format_of,
    missing_parts,
    quantised_modules,
    read_matrix,
    scheme_of,
)
from llmcompress.validate.matrix import Matrix
from llmcompress.validate.stored import DamageError, Tensor, read_json, read_tensors

AGREEMENT = 1e-3  # relative difference between a recorded and a measured error
_ROUNDING = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24, "F64": 2.0**-53}
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # store matrices [in, out]
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_HEADS = {"lm_head", "embed_out"}
_ROWS = 512  # of a matrix, compared at once
_GRID = re.compile(r"int(\d)-(?:row|g(\d+))-(?:sym|asym)")

# what settings of types and sizes that no writer gives them lead to
_MISFITS = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, re.error)

_GPTQ_KEYS = ("bits", "group_size", "sym", "desc_act", "lm_head", "checkpoint_format")
_PACKED_KEYS = ("format", "quantization_status", "config_groups", "ignore")
_BITSANDBYTES_KEYS = ("load_in_4bit", "load_in_8bit", "llm_int8_skip_modules")
_WEIGHT_KEYS = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "observer"}
_MAY_DIFFER = {"quantization_config", "dtype", "torch_dtype", "tie_word_embeddings"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. warning: a failure is worth knowing, but the directory is not wrong."""

    name: str
    ok: bool
    detail: str
    warning: bool = False


@dataclass(frozen=True)
class _Directory:
    path: Path
    config: Mapping[str, Any]
    form: str
    tensors: Mapping[str, Tensor]
    report: Mapping[str, Any]

    @property
    def records(self) -> dict[str, Mapping[str, Any]]:
        """What the report says of each linear, by its on-disk name."""
        return {record["name"]: record for record in self.report.get("linears", ())}


def verify(out: Path, source: Path | None = None) -> list[Check]:
    """Look at everything in `out`, and compare it with the model it was made from if `source` is given.

    The artifact is good if every check that is no warning is ok. Never raises for damage in `out`.
    """
    try:
        tensors = read_tensors(out)
        config = read_json(out / "config.json")
        form = format_of(config)
    except (DamageError, OSError) as error:
        return [Check("files", False, str(error))]
    checks = [
        Check("files", True, f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors.values())} bytes")
    ]
    try:
        report = read_json(out / "report.json")
        unusable = _report_wrongs(report, form)
        checks.append(summary("report", unusable, "names this format and every linear"))
        report = {} if unusable else report
    except DamageError as error:
        report = {}
        checks.append(Check("report", False, str(error)))
    directory = _Directory(out, config, form, tensors, report)
    checks.append(guarded("config", lambda: summary("config", _config_wrongs(directory), "keys and tensors agree")))
    checks.append(guarded("hashes", lambda: _hashes(directory)))
    infinite = [f"{name} holds values that are not finite" for name, tensor in tensors.items() if not tensor.finite()]
    checks.append(summary("finite", infinite, "every value"))
    matrices: dict[str, Matrix] = {}
    wrong = _read_all(directory, matrices)
    if form == "dense":
        wrong += guarded_list(lambda: _too_many_values(directory))
    checks.append(summary("matrices", wrong, f"{len(matrices) or len(directory.records)} on their grids"))
    checks.append(_fused(directory, matrices))
    if source is not None:
        checks += _against(directory, matrices, source)
    return checks


def passed(checks: Sequence[Check]) -> bool:
    return all(check.ok or check.warning for check in checks)


def summary(name: str, wrong: Sequence[str], right: str) -> Check:
    """A check that is ok if nothing is `wrong`; else the first three of what is."""
    if not wrong:
        return Check(name, True, right)
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    return Check(name, False, "; ".join(wrong[:3]) + more)


def guarded(name: str, look: Callable[[], Check]) -> Check:
    """Damage that stops a look is a failed check; so are settings of types that no config should have."""
    try:
        return look()
    except LlmcompressError as error:
        return Check(name, False, error.message)
    except DamageError as error:
        return Check(name, False, str(error))
    except _MISFITS as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


def guarded_list(look: Callable[[], list[str]]) -> list[str]:
    """What a look finds wrong, or the damage that stopped it."""
    check = guarded("", lambda: summary("", look(), ""))
    return [] if check.ok else [check.detail]


def _report_wrongs(report: Mapping[str, Any], form: str) -> list[str]:
    wrong = [f"report.json has no {key!r}" for key in ("format", "linears", "tensors") if key not in report]
    if report.get("format", form) != form:
        wrong.append(f"report.json says format {report['format']}, config.json says {form}")
    linears = report.get("linears", [])
    if not isinstance(linears, list) or not all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("grid", 0), str | None)
        for item in linears
    ):
        return [*wrong, "report.json has linears without name or grid"]
    return wrong


def _hashes(directory: _Directory) -> Check:
    recorded = directory.report.get("tensors")
    if not isinstance(recorded, dict):
        return Check("hashes", False, "report.json records none")
    wrong = [f"{name} is not in report.json" for name in directory.tensors.keys() - recorded.keys()]
    wrong += [f"{name} is in report.json and in no file" for name in recorded.keys() - directory.tensors.keys()]
    for name, tensor in directory.tensors.items():
        if name in recorded and tensor.sha256() != recorded[name]:
            wrong.append(f"{name} is not what was written")
    return summary("hashes", sorted(wrong), "every tensor has the recorded SHA-256")


def _read_all(directory: _Directory, matrices: dict[str, Matrix]) -> list[str]:
    """Decode every quantised matrix into `matrices`; what is wrong with them."""
    wrong: list[str] = []
    for module, parts in quantised_modules(directory.tensors, directory.form).items():
        if missing := missing_parts(directory.form, parts):
            wrong.append(f"{module} has no {', '.join(sorted(missing))}")
            continue

        def look(module: str = module) -> list[str]:
            matrices[module], found = read_matrix(module, directory.tensors, directory.config)
            return found

        wrong += guarded_list(look)
    return wrong


def _config_wrongs(directory: _Directory) -> list[str]:
    recorded = {name: record["grid"] for name, record in directory.records.items() if record["grid"]}
    if directory.form == "dense":
        absent = [name for name in recorded if f"{name}.weight" not in directory.tensors]
        return [f"report.json speaks of {name}, which has no weight" for name in absent]
    settings = directory.config["quantization_config"]
    look = {"gptq": _gptq_wrongs, "compressed-tensors": _packed_wrongs, "bitsandbytes": _bitsandbytes_wrongs}
    wrong = look.get(directory.form, _own_wrongs)(directory, settings)
    if wrong:
        return wrong  # what follows reads the keys that are missing
    coded = set(quantised_modules(directory.tensors, directory.form))
    plain = {
        name.removesuffix(".weight") for name, tensor in directory.tensors.items() if _plain_matrix(tensor)
    } - coded
    for module in sorted(coded):
        scheme = scheme_of(module, directory.config)
        if scheme is None:
            wrong.append(f"{module} is quantised, and config.json says that it is not")
        elif recorded and recorded.get(module) != scheme.name:
            wrong.append(f"{module} is {scheme.name} by config.json, {recorded.get(module)} by report.json")
    wrong += [
        f"{module} is not quantised, and config.json says that it is"
        for module in sorted(plain)
        if scheme_of(module, directory.config) is not None
    ]
    wrong += [f"{name} is in report.json and is not quantised" for name in sorted(recorded.keys() - coded)]
    return wrong


def _plain_matrix(tensor: Tensor) -> bool:
    """A matrix that a loader might take for a quantised linear: inside a layer, or outside and no embedding."""
    path, _, part = tensor.name.rpartition(".")
    leaf = path.rpartition(".")[2]
    table = re.search(r"emb|wte|wpe", leaf) is not None and leaf not in _HEADS
    inside = re.search(r"(^|\.)\d+\.", path) is not None
    return part == "weight" and len(tensor.shape) == 2 and (inside or not table)


def _gptq_wrongs(directory: _Directory, settings: Mapping[str, Any]) -> list[str]:
    wrong = [f"quantization_config has no {key!r}" for key in _GPTQ_KEYS if key not in settings]
    if wrong:
        return wrong
    if settings["bits"] not in (2, 3, 4, 8):
        wrong.append(f"bits is {settings['bits']}")
    if settings["checkpoint_format"] != ("gptq" if settings["sym"] else "gptq_v2"):
        wrong.append(f"checkpoint_format is {settings['checkpoint_format']} with sym {settings['sym']}")
    if not 0 < settings.get("damp_percent", 0.01) < 1:
        wrong.append("damp_percent is not between 0 and 1")
    if read_json(directory.path / "quantize_config.json") != settings:
        wrong.append("quantize_config.json and quantization_config differ")
    coded = quantised_modules(directory.tensors, "gptq")
    inside = sorted(module for module in coded if re.search(r"(^|\.)\d+\.", module))
    if settings["lm_head"] != (len(inside) < len(coded)):
        wrong.append(f"lm_head is {settings['lm_head']}, which the tensors deny")
    listed = settings.get("modules_in_block_to_quantize")
    if listed is not None and sorted(name for part in listed for name in part) != inside:
        wrong.append("modules_in_block_to_quantize does not list what is quantised")
    if listed is None and any(rule.startswith("-:") for rule in settings.get("dynamic") or {}):
        wrong.append("modules are skipped by `dynamic`, and modules_in_block_to_quantize is missing")
    return wrong


def _packed_wrongs(directory: _Directory, settings: Mapping[str, Any]) -> list[str]:
    wrong = [f"quantization_config has no {key!r}" for key in _PACKED_KEYS if key not in settings]
    if wrong:
        return wrong
    if settings["quantization_status"] != "compressed":
        wrong.append(f"quantization_status is {settings['quantization_status']!r}, so loaders ignore the codes")
    if settings["format"] != "pack-quantized":
        wrong.append(f"format is {settings['format']!r}")
    if not settings["config_groups"]:
        wrong.append("config_groups is empty")
    for name, group in settings["config_groups"].items():
        wrong += [f"{name} has no {key!r}" for key in ("targets", "format", "weights") if key not in group]
        if unknown := set(group.get("weights", ())) - _WEIGHT_KEYS:
            wrong.append(f"{name} has unknown keys in weights: {', '.join(sorted(unknown))}")
    coded = quantised_modules(directory.tensors, "compressed-tensors")
    linear = any("Linear" in group.get("targets", ()) for group in settings["config_groups"].values())
    if linear and not _HEADS & (set(coded) | set(settings["ignore"])):
        wrong.append("ignore does not name the head, which loaders would take for quantised")
    for name in settings["ignore"]:
        if name in coded:
            wrong.append(f"{name} is quantised and in ignore")
    return wrong


def _bitsandbytes_wrongs(directory: _Directory, settings: Mapping[str, Any]) -> list[str]:
    wrong = [f"quantization_config has no {key!r}" for key in _BITSANDBYTES_KEYS if key not in settings]
    if wrong:
        return wrong
    if settings["load_in_4bit"] == settings["load_in_8bit"]:
        wrong.append("load_in_4bit and load_in_8bit say the same")
    if settings["load_in_4bit"] and settings.get("bnb_4bit_quant_type") != "nf4":
        wrong.append(f"bnb_4bit_quant_type is {settings.get('bnb_4bit_quant_type')!r}")
    if not _HEADS & set(settings["llm_int8_skip_modules"]):
        wrong.append("llm_int8_skip_modules does not name the head, which loaders would take for quantised")
    return wrong


def _own_wrongs(directory: _Directory, settings: Mapping[str, Any]) -> list[str]:
    return [] if isinstance(settings.get("modules"), dict) else ["quantization_config has no 'modules'"]


def _fused(directory: _Directory, matrices: Mapping[str, Matrix]) -> Check:
    """vLLM and SGLang run some linears as one, which needs one scheme for all of them."""
    wrong = []
    for parent in sorted({module.rpartition(".")[0] for module in matrices}):
        for leaves in _FUSED:
            members = [f"{parent}.{leaf}" for leaf in leaves]
            held = [name for name in members if name in matrices or f"{name}.weight" in directory.tensors]
            if len({matrices[name].scheme if name in matrices else None for name in held}) > 1:
                wrong.append(f"{', '.join(held)} are not on one grid")
    check = summary("fused", wrong, "linears that engines fuse share a grid")
    return Check(check.name, check.ok, check.detail, warning=True)


def _against(directory: _Directory, matrices: Mapping[str, Matrix], source: Path) -> list[Check]:
    try:
        originals = read_tensors(source)
        config = read_json(source / "config.json")
    except (DamageError, OSError) as error:
        return [Check("source", False, f"the source cannot be read: {error}")]
    keys = (config.keys() | directory.config.keys()) - _MAY_DIFFER
    changed = sorted(key for key in keys if config.get(key) != directory.config.get(key))
    wrong = [f"config.json has another {key!r} than the source" for key in changed]
    wrong += guarded_list(lambda: _completeness(directory, matrices, originals))
    bound = guarded_list(lambda: _bound_wrongs(directory, matrices, originals))
    return [
        summary("source", wrong, f"{len(originals)} tensors, each unchanged or quantised"),
        summary("bound", bound, f"{len(directory.records)} matrices as near to the source as recorded"),
    ]


def _completeness(directory: _Directory, matrices: Mapping[str, Matrix], originals: Mapping[str, Tensor]) -> list[str]:
    tied = bool(directory.config.get("tie_word_embeddings"))
    rounded = {f"{name}.weight" for name in directory.records} if directory.form == "dense" else set()
    wrong, accounted = [], set()
    for name, original in originals.items():
        module = name.removesuffix(".weight")
        if module in matrices:
            accounted |= {f"{module}.{part}" for part in PARTS[directory.form]}
            shape = (matrices[module].rows, matrices[module].width)
            if original.shape not in (shape, shape[::-1]):
                wrong.append(f"{module} is {shape[0]} x {shape[1]}, in the source {list(original.shape)}")
        elif name in directory.tensors:
            accounted.add(name)
            written = directory.tensors[name]
            if name in rounded:
                if (written.dtype, written.shape) != (original.dtype, original.shape):
                    wrong.append(f"{name} has another type or shape than in the source")
            elif not written.equals(original):
                wrong.append(f"{name} differs from the source")
        elif not (tied and name.removesuffix(".weight") in _HEADS):
            wrong.append(f"{name} of the source is missing")
    for name in sorted(directory.tensors.keys() - accounted):
        head = name.rpartition(".")[0] in _HEADS and (
            name.rpartition(".")[0] in matrices
            or any(directory.tensors[name].equals(table) for other, table in originals.items() if "emb" in other)
        )
        if not head:  # a head untied from the embedding
            wrong.append(f"{name} does not come from the source")
    return wrong


def _bound_wrongs(directory: _Directory, matrices: Mapping[str, Matrix], originals: Mapping[str, Tensor]) -> list[str]:
    wrong = []
    for module, record in directory.records.items():
        original = originals.get(f"{module}.weight")
        if original is None or not record["grid"]:
            continue
        written = matrices.get(module) or directory.tensors.get(f"{module}.weight")
        if written is None:
            wrong.append(f"{module} cannot be decoded")
            continue
        transposed = _transposed(directory, record, original, written)
        nearest = record.get("method") == "rtn" and isinstance(written, Matrix)
        error, norm, far = 0.0, 0.0, 0
        rows = original.shape[1 if transposed else 0]
        for start in range(0, rows, _ROWS):
            part = slice(start, min(start + _ROWS, rows))
            theirs = original.floats(part, transposed=transposed)
            mine = written.decode(part) if isinstance(written, Matrix) else written.floats(part, transposed=transposed)
            difference = np.abs(theirs.astype(np.float64) - mine)
            error += float(np.square(difference).sum())
            norm += float(np.square(theirs.astype(np.float64)).sum())
            if nearest and isinstance(written, Matrix):
                far += int((difference > written.reach(part, theirs)).sum())
        if far:
            wrong.append(f"{module} has {far} values further from the source than rounding takes them")
        stored_as = written.dtype if isinstance(written, Tensor) else None
        wrong += _error_wrongs(module, record, float(np.sqrt(error / norm)) if norm else 0.0, stored_as)
    return wrong


def _transposed(directory: _Directory, record: Mapping[str, Any], original: Tensor, written: Matrix | Tensor) -> bool:
    if "transposed" in record:
        return bool(record["transposed"])
    if isinstance(written, Matrix) and written.rows != written.width:
        return original.shape != (written.rows, written.width)
    return directory.config.get("model_type") in _CONV1D


def _error_wrongs(module: str, record: Mapping[str, Any], error: float, stored_as: str | None) -> list[str]:
    recorded = record.get("relative_error")
    slack = _ROUNDING[stored_as] * (1 + error) if stored_as in _ROUNDING else 0.0
    if not isinstance(recorded, (int, float)):
        return [f"{module} has no relative_error in report.json"]
    if not abs(error - recorded) <= AGREEMENT * recorded + slack + 1e-9:
        return [f"{module} has a relative error of {error:.6g}, report.json says {recorded:.6g}"]
    if not error < 1:
        return [f"{module} is no nearer to the source than zeros would be (relative error {error:.3g})"]
    return []


def _too_many_values(directory: _Directory) -> list[str]:
    """Decoded weights: modules with a group that holds more different values than its grid has.

    Where groups may follow the activation order they are not known here, and a row may hold the values of all of them.
    """
    wrong = []
    for module, record in directory.records.items():
        tensor = directory.tensors.get(f"{module}.weight")
        found = _GRID.fullmatch(str(record["grid"]))
        if tensor is None or found is None:
            continue
        weight = tensor.floats(transposed=_transposed(directory, record, tensor, tensor))
        size, levels = int(found[2] or weight.shape[1]), 1 << int(found[1])
        if record.get("permuted", record.get("method") != "rtn"):
            size, levels = weight.shape[1], levels * (weight.shape[1] // size)
        for start in range(0, weight.shape[0], _ROWS):
            values = np.sort(weight[start : start + _ROWS].reshape(-1, size), axis=1)
            if int((np.diff(values, axis=1) != 0).sum(1).max(initial=0)) >= levels:
                wrong.append(f"{module} has groups of more than {levels} values")
                break
    return wrong
