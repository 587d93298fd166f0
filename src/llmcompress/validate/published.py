"""Whether a directory holds the files that its report.json recorded, byte for byte, and nothing else.

No signature: whoever renews every hash and the digest of the report is not found out here.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcompress.validate.findings import Check, guarded, summary
from llmcompress.validate.stored import DamageError, is_blob

FRONT = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)
_INDEX = re.compile(r"^model-index:.*\n([ -].*\n)*", re.MULTILINE)  # the key and the lines below it
REPORT = "report.json"
CARD = "README.md"
_HUB = ".cache/huggingface/"  # where hub clients keep what they know of a download
_ATTRIBUTES = ".gitattributes"  # that they add
_CHANGED = "is not what was written"
_CHUNK = 1 << 22


def report_edits(text: bytes) -> list[str]:
    """A fault if a report's text is not, to the byte, what its last key is the digest of."""
    report = json.loads(text)
    digest = report.pop("sha256", None)
    if digest is None:
        return ["report.json holds no digest of itself: it is of an older version, or was edited"]
    renewed = hashlib.sha256(_json(report)).hexdigest()
    same = digest == renewed and text == _json({**report, "sha256": digest})
    return [] if same else ["report.json was edited after it was written"]


def recorded_files(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a report says of each file of its output; DamageError where it says nothing."""
    recorded = report.get("files")
    if not isinstance(recorded, dict) or not recorded:
        raise DamageError(
            f"{REPORT} records no files (of an older version?), so only tensors are proved: write it anew"
        )
    return recorded


def directory_checks(path: Path, report: Mapping[str, Any]) -> list[Check]:
    """Whether an output holds the files that its report recorded; and a warning about what people and hubs do to it."""
    told: list[str] = []
    right = "every file as recorded, and no other"
    checks = [guarded("directory", lambda: summary("directory", _directory_wrongs(path, report, told), right))]
    return [*checks, replace(summary("additions", told, ""), warning=True)] if told else checks


def _directory_wrongs(path: Path, report: Mapping[str, Any], told: list[str]) -> list[str]:
    """Files that are missing, changed, or should not be there; into `told`, what is only to be told."""
    recorded = recorded_files(report)
    present = present_files(path)
    wrong = [f"{name} is missing" for name in sorted(recorded.keys() - present)]
    for name in sorted(present):
        if name == REPORT or name in recorded:
            found = misfit(path / name) if name == REPORT else content_wrong(path / name, recorded[name])
            if name == CARD and found == _CHANGED:
                told.append(f"{name} {_card_change(path / name, recorded[name])}")
            else:
                wrong.extend([f"{name} {found}"] if found else [])
        else:
            other = name == _ATTRIBUTES or name.startswith(_HUB)
            (told if other else wrong).append(f"{_shown(name)} was not written by the run")
    return wrong


def without_figures(text: str) -> str:
    """A card as it is without its model-index."""
    found = FRONT.match(text)
    return text if found is None else f"---\n{_INDEX.sub('', found[1])}{text[found.end(1) :]}"


def _card_change(card: Path, record: Mapping[str, Any]) -> str:
    """What became of a model card: figures that `eval --update-card` writes into it leave the rest as it was."""
    written = without_figures(card.read_bytes().decode(errors="replace")).encode()
    same = hashlib.sha256(written).hexdigest() == record.get("sha256")
    return "has got figures of an evaluation and is otherwise what was written" if same else _CHANGED


def misfit(file: Path) -> str | None:
    """What is wrong with a file whatever it holds; None where nothing is."""
    if file.is_symlink() and not is_blob(file):
        return "is a link"
    return None if file.is_file() else "is not a file"  # a pipe would block for ever


def content_wrong(file: Path, record: Mapping[str, Any]) -> str | None:
    """What is wrong with a file by its record in the report; None where nothing is."""
    if found := misfit(file):
        return found
    whole, header = record.get("sha256"), record.get("header_sha256")
    if not isinstance(whole or (file.suffix == ".safetensors" and header), str):
        return "has no hash in report.json"
    same = file.stat().st_size == record.get("bytes")
    same = same and (file_sha256(file) == whole if whole else _header_sha256(file) == header)
    return None if same else _CHANGED


def present_files(path: Path) -> set[str]:
    """Every file and link below a directory by its relative name, and every directory that holds none."""
    found = set()
    for folder, folders, files in os.walk(path, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]  # noqa: PTH114, PTH118
        here = Path(folder).relative_to(path)
        found |= {(here / name).as_posix() for name in (*files, *links)}
        if not (files or folders or here == Path()):
            found.add(f"{here.as_posix()}/")
    return found


def _raise(error: OSError) -> None:
    raise error


def file_sha256(file: Path) -> str:
    """SHA-256 (hex) of the content of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while piece := handle.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def _header_sha256(file: Path) -> str:
    """The hash of what comes before the data of a safetensors file, whose length `read_tensors` has checked."""
    with file.open("rb") as handle:
        prefix = handle.read(8)
        return hashlib.sha256(prefix + handle.read(int.from_bytes(prefix, "little"))).hexdigest()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _shown(name: str) -> str:
    """A name made safe to print."""
    return name if name.isprintable() else ascii(name)
