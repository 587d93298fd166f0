"""From what a user names to a source, and from its tokens to a file that the source `ids` reads."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

import llmcompress.calib
from llmcompress.calib.base import Source, fingerprint
from llmcompress.calib.documents import unreadable
from llmcompress.calib.ids import KEY, SUFFIX
from llmcompress.errors import CalibrationError, LlmcompressError, PlanError
from llmcompress.formats.base import TensorSpec
from llmcompress.registry import discover, suggest
from llmcompress.store.files import refuse_existing
from llmcompress.store.headers import read_file_header
from llmcompress.store.unfinished import claimed, put_in_place
from llmcompress.store.weight_files import weight_file

if TYPE_CHECKING:
    from torch import Tensor

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def resolve(spec: str, **options: Any) -> Source:
    """The source that `spec` names: 'default', 'self', a path, or any source's name with its path among `options`."""
    sources: dict[str, type[Source]] = discover(llmcompress.calib, "SOURCE")
    named = sources.get(spec)
    if named is not None and ("path" in options or "path" not in named.model_fields):
        return _build(named, options)
    path = Path(spec)
    try:
        exists = spec != "" and path.exists()
    except OSError as error:
        raise unreadable(path, error) from None
    if exists:
        for source in sources.values():
            if source.detects(path):
                return _build(source, {**options, "path": path})
        raise CalibrationError(f"{spec} is of no kind that is read as calibration data", _accepted(sources))
    if named is not None:
        raise CalibrationError(f"calibration source {spec} needs a path", f"it reads {named.accepts}")
    # a suffix of letters is a file that is missing; a hub id ends like llama-3.1 at most
    if "://" in spec or (HUB_ID.fullmatch(spec) and not path.suffix[1:2].isalpha()):
        raise CalibrationError(
            f"there is no file or folder {spec}, and llmcompress works offline: it takes no data from a hub",
            "download it, write it with datasets' save_to_disk and give that folder, or use 'default' or 'self'",
        )
    near = get_close_matches(spec, [name for name, source in sources.items() if "path" not in source.model_fields], n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise CalibrationError(f"no calibration source or file {spec!r}", guess + _accepted(sources))


def _build(source: type[Source], options: dict[str, Any]) -> Source:
    """The source with its options checked."""
    for name in options:
        if name not in source.model_fields:
            known = list(source.model_fields)
            hint = suggest(name, known) if known else f"{source.name} takes no options"
            raise CalibrationError(f"calibration source {source.name} has no option {name!r}", hint)
    try:
        return source(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise CalibrationError(f"option {name} of calibration source {source.name}: {message}") from None


def _accepted(sources: dict[str, type[Source]]) -> str:
    """What may be given."""
    return "accepted: " + "; ".join(source.accepts for source in sources.values())


def save(tokens: "Tensor", path: Path) -> None:
    """Write `tokens` [samples, length] of any integer type as int64 `input_ids`; `path` appears whole or not at all.

    The same tokens give the same bytes.
    """
    import torch

    path = Path(path)
    _refuse_suffix(path)
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise TypeError(f"tokens are {tokens.dtype} {list(tokens.shape)}, not integers [samples, length]")
    ids = tokens.detach().to("cpu", torch.int64).contiguous()
    specs = [TensorSpec(KEY, "I64", tuple(ids.shape))]
    header = weight_file(path.name, specs, {"format": "pt", "sha256": fingerprint(ids)}).header
    content = header + ids.numpy().astype("<i8").tobytes()
    try:
        path.parent.stat()  # is not made
        with claimed(path) as claim:
            put_in_place(claim, path, content)
    except OSError as error:
        raise CalibrationError(
            f"cannot write {path}: {error.strerror or error}", "name a file in a folder that exists"
        ) from None


def refuse_place(path: Path, overwrite: bool) -> None:
    """PlanError where windows may not be written to `path`: others are replaced only where `overwrite` says so.

    Nothing else is ever replaced, such as the weights of a model; CalibrationError for a file of another name.
    """
    _refuse_suffix(path)
    refuse_existing(path, overwrite)
    if path.exists():
        try:
            tokens = tuple(read_file_header(path))
        except LlmcompressError:
            tokens = ()
        if tokens != (KEY,):
            raise PlanError(f"{path} does not hold packed token ids, so it is not overwritten", "give another file")


def _refuse_suffix(path: Path) -> None:
    if path.suffix.lower() != SUFFIX:
        raise CalibrationError(f"packed token ids go into a {SUFFIX} file, not {path.name}", f"name it *{SUFFIX}")
