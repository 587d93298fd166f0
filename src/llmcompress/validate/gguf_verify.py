"""Proof that a GGUF file is what it claims to be: values are decoded by the gguf package, never by what wrote them.

What is proved, in words:

- files: header, shards and lengths agree; every tensor within its file, without gap or overlap.
- keys: architecture and sizes are there and are those of the tensors; every layer has the same tensors, if they are
  alike in models of the architecture.
- tokens: as many as the embedding has rows, each another text; types, scores, merges and special ids fit them.
- finite: every decoded value is, so every scale is.
- report: it is, to the byte, what its digest was made of; a file without one is good only beside its source.
- file, directory: the file, and what belongs to it, has the SHA-256 that the report recorded; nothing else is there.
- hashes: every tensor has the SHA-256 that the report recorded.
- source: the tensors and hyperparameters are those llama.cpp asks for, of these shapes, and no others; every key has
  the value that the source gives, tokens and chat template included. The source may be a GGUF file.
- bound: of every matrix the relative error ||W - W'|| / ||W|| (Frobenius), rows in GGUF's order, is the one recorded in
  the report, to 0.1%, and below that of the worst data its type can meet with the nearest codes of scales that span a
  group: sqrt(group) / steps. F32 is exact; F16 and BF16 are off by their rounding at most.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcompress.engine.source.adapting import as_merged
from llmcompress.engine.source.gguf_input import GgufHeaders, names_of
from llmcompress.engine.source.gguf_weights import EncodedRows, expected_tensors, parts_of, source_mismatches
from llmcompress.engine.source.open import open_checkpoint, source_headers
from llmcompress.engine.source.stacked import unstacked_headers
from llmcompress.errors import CheckpointError, LlmcompressError
from llmcompress.formats.gguf.bounds import farthest
from llmcompress.formats.gguf.family import are_alike
from llmcompress.formats.gguf.tensors import GGUFTensor, convert
from llmcompress.ledger import Ledger
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint, Scaled
from llmcompress.store.gguf_header import GgufHeader, scalar_value
from llmcompress.store.gguf_model import decoded, is_factor, read_gguf, rows_of, tensor_bytes
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.output_file import beside, report_of
from llmcompress.validate.directory import is_rotated, read_scales
from llmcompress.validate.findings import AGREEMENT, Check, guarded, guarded_list, lacks_adapter, summary
from llmcompress.validate.gguf_keys import key_wrongs
from llmcompress.validate.gguf_report import report_checks
from llmcompress.validate.gguf_tokens import against_source, token_wrongs
from llmcompress.validate.stored import DamageError

_AT_ONCE = 1 << 22  # values compared at once
_HALF_STEP = {"F32": (0.0, 0.0), "F16": (2.0**-11, 2.0**-25), "BF16": (2.0**-8, 2.0**-134)}  # relative, absolute
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def verify_gguf(file: Path, source: Path | None = None, adapter: Path | None = None) -> list[Check]:
    """Check a whole GGUF file (or its shards), and compare the file with `source`, if given, and `adapter` merged in.

    The file is good if every check that is not a warning is ok. Never raises for damage in the file or in `source`.
    """
    try:
        header = read_gguf(file)
    except CheckpointError as error:
        return [Check("files", False, error.message)]
    report, proven = report_checks(header, source is not None)
    checks = [
        Check("files", True, f"{len(header.tensors)} tensors, {header.nbytes} bytes"),
        *proven,
        guarded("keys", lambda: summary("keys", _key_wrongs(header), "sizes are those of the tensors")),
        guarded("tokens", lambda: summary("tokens", token_wrongs(header), "one for each row of the embedding")),
        guarded("finite", lambda: summary("finite", _infinite(header), "every value")),
    ]
    if report:
        checks.append(guarded("hashes", lambda: summary("hashes", _hash_wrongs(header, report), "as recorded")))
    return checks if source is None else checks + _against(header, report, source, adapter)


def _key_wrongs(header: GgufHeader) -> list[str]:
    arch = scalar_value(header, "general.architecture")
    width, rows = scalar_value(header, f"{arch}.embedding_length"), scalar_value(header, f"{arch}.vocab_size")
    wrong = []
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or embedding.shape != (rows, width):
        shape = None if embedding is None else list(embedding.shape)
        wrong.append(f"token_embd.weight is {shape}, the keys say [{rows}, {width}]")
    layers: dict[int, set[str]] = {}
    for name in header.tensors:
        if found := _LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), set()).add(found[2])
    count = scalar_value(header, f"{arch}.block_count")
    if sorted(layers) != list(range(len(layers))) or len(layers) != count:
        wrong.append(f"there are {len(layers)} layers, {arch}.block_count is {count}")
    if are_alike(str(arch)):
        odd = [number for number in layers if layers[number] != layers.get(0)]
        wrong += [f"layer {number} has not the tensors of layer 0" for number in odd]
    if any(tensor.type not in _HALF_STEP for tensor in header.tensors.values()):
        version = scalar_value(header, "general.quantization_version")
        wrong += [] if version == 2 else [f"general.quantization_version is {version}, not 2"]
    return wrong


def _infinite(header: GgufHeader) -> list[str]:
    return [
        f"{name} holds values that are not finite"
        for name in header.tensors
        if not all(
            bool(np.isfinite(decoded(header, name, begin, end)).all())
            for begin, end in _panels(header, name, 0, rows_of(header, name))
        )
    ]


def _panels(header: GgufHeader, name: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Rows `begin` to `end` of a tensor in ranges of bounded size."""
    step = max(1, _AT_ONCE // (header.tensors[name].shape or (1,))[-1])
    for at in range(begin, end, step):
        yield at, min(at + step, end)


def _hash_wrongs(header: GgufHeader, report: Mapping[str, Any]) -> list[str]:
    recorded = report["tensors"]
    wrong = [f"{name} is not in the report" for name in header.tensors if name not in recorded]
    wrong += [f"{name} is in the report and not in the file" for name in recorded if name not in header.tensors]
    for name in header.tensors:
        if name in recorded and hashlib.sha256(tensor_bytes(header, name).data).hexdigest() != recorded[name]:
            wrong.append(f"{name} is not what was written")
    return wrong


def _against(header: GgufHeader, report: Mapping[str, Any], source: Path, adapter: Path | None) -> list[Check]:
    if unmerged := lacks_adapter(report, adapter):
        return unmerged
    try:
        headers = source_headers(source, Ledger())
        headers = unstacked_headers(headers, Ledger()) if report.get("unstacked") else headers
        checkpoint = open_checkpoint(as_merged(headers, adapter))
        tensors, wrong = _from_source(header, checkpoint.headers)
    except LlmcompressError as error:
        return [Check("source", False, f"the source cannot be read: {error.message}")]
    checks = [summary("source", wrong, f"{len(tensors)} tensors, each that of the source")]
    if wrong:
        return checks  # what follows reads tensors that may be missing
    keys = guarded_list(lambda: key_wrongs(header, checkpoint.headers, report))
    checks.append(summary("source keys", keys, "hyperparameters, tokenizer and all others are the source's"))
    if not isinstance(checkpoint.headers, GgufHeaders):
        tokens = guarded_list(lambda: against_source(header, source))
        checks.append(summary("source tokens", tokens, "texts, merges and chat template are the source's"))
    if is_rotated(report):
        there = "rotated as recorded: whether values are near the source's is for `eval` to say"
        return [*checks, Check("bound", True, there)]
    bound = guarded_list(lambda: list(_bound_wrongs(header, report, _as_scaled(header, report, checkpoint), tensors)))
    return [
        *checks,
        summary("bound", bound, "every tensor as near to the source as its type can be and the report says"),
    ]


def _from_source(header: GgufHeader, source: ModelHeaders) -> tuple[list[GGUFTensor], list[str]]:
    """The tensors that a file made of `source` holds, and what rules `source` out; CheckpointError."""
    if not isinstance(source, GgufHeaders):
        tensors = expected_tensors(header, source)
        return tensors, source_mismatches(header, source, tensors)
    items = {name: item for name, item in source.gguf.tensors.items() if not is_factor(source.gguf, name)}
    tensors = [GGUFTensor(name, item.shape, names_of(item)) for name, item in items.items()]
    theirs = {name: item.shape for name, item in items.items()}
    # values are compared as they are multiplied by factors, of which each file has those that its types need
    ours = {name: item.shape for name, item in header.tensors.items() if not is_factor(header, name)}
    wrong = [f"tensor {name} is not as in the source" for name in sorted(theirs.keys() | ours.keys())
             if theirs.get(name) != ours.get(name)]  # fmt: skip
    return tensors, wrong


def _as_scaled(header: GgufHeader, report: Mapping[str, Any], checkpoint: Checkpoint) -> Checkpoint:
    """The source times the factors that the run recorded."""
    recorded = read_scales(beside(header.path, "transforms.npz"))
    if not report_of(header.path).exists():
        recorded = read_scales(header.path.with_name("transforms.npz"))
    rounded = frozenset(f"{record['name']}.weight" for record in report.get("linears", ()))
    scaled = FoldedCheckpoint(checkpoint, rounded)
    for key, factor in recorded.items():
        name, _, axis = key.rpartition("/")
        if axis != "offset":
            tensor = checkpoint.headers.tensors.get(name)
            if tensor is None or factor.shape != (tensor.spec.shape[int(axis)],):
                raise DamageError(f"transforms.npz: {key} has {factor.size} factors, which the source's tensor has not")
            offset = float(recorded.get(f"{name}/offset", np.float64(0)))
            scaled.fold({name: [Scaled(torch.from_numpy(factor), int(axis), offset=offset)]})
    return scaled


def _bound_wrongs(
    header: GgufHeader, report: Mapping[str, Any], checkpoint: Checkpoint, tensors: Sequence[GGUFTensor]
) -> Iterator[str]:
    recorded = {f"{record['name']}.weight": record for record in report.get("linears", ())}
    sums: dict[str, _Sums] = {}
    for tensor in tensors:
        names = tensor.sources or (tensor.name,)
        for name, part in zip(names, parts_of(header, tensor), strict=True):
            source = replace(tensor, shape=part.shape, sources=(name,) if tensor.sources else ())
            theirs = convert(source, checkpoint.read).reshape(part.end - part.begin, -1).numpy()
            yield from _part_wrongs(header, part, theirs, name, recorded.get(name), sums)
    for name, total in sums.items():
        found, said = total.relative, recorded[name]["relative_error"]
        if not abs(found - said) <= AGREEMENT * said + total.slack:
            yield f"{total.tensor} has a relative error of {found:.6g} from {name}, the report says {said:.6g}"


@dataclass
class _Sums:
    """Of all tensors that are made of one matrix, together: sums of squares of errors and of values."""

    tensor: str
    error: float = 0.0
    norm: float = 0.0
    slack: float = 0.0

    @property
    def relative(self) -> float:
        return math.sqrt(self.error / self.norm) if self.norm else math.sqrt(self.error)


def _part_wrongs(
    header: GgufHeader,
    part: EncodedRows,
    theirs: NDArray[np.float32],
    source: str,
    record: Mapping[str, Any] | None,
    sums: dict[str, _Sums],
) -> Iterator[str]:
    """Faults of a part's values beside `theirs`, the source's values, float32 [rows, width]; adds to `sums`."""
    name = part.tensor.name
    kind = header.tensors[name].type
    error, norm, far = 0.0, 0.0, 0
    for begin, end in _panels(header, name, part.begin, part.end):
        weight = theirs[begin - part.begin : end - part.begin].astype(np.float64)
        difference = np.abs(weight - decoded(header, name, begin, end))
        error += float(np.square(difference).sum())
        norm += float(np.square(weight).sum())
        if kind in _HALF_STEP:
            relative, least = _HALF_STEP[kind]
            far += int((difference > relative * np.abs(weight) + least).sum())
    pruned = record is not None and "pruner" in record
    slack = 1e-7 + 2**-8 * (kind in _HALF_STEP)  # pruned values of bfloat16 may be rounded once more
    if far and not pruned:
        yield f"{name} has {far} values that are not {source} in {kind}"
    if kind in _HALF_STEP and not pruned:
        return
    found = _Sums(name, error, norm).relative
    bound = farthest(kind, norm, theirs.size) if record is None else 1.0
    if record is not None and (record.get("recovered") or record.get("loss", 1) < 1):  # moved, to keep outputs
        bound = math.inf
    if not found < bound:
        yield f"{name} is further from {source} than {kind} takes it (relative error {found:.3g})"
    elif record is not None:
        total = sums.setdefault(source, _Sums(name))
        total.error, total.norm, total.slack = total.error + error, total.norm + norm, slack
