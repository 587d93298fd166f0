"""Directories of draft heads: config.json and model.safetensors, of whichever kind."""

from pathlib import Path

import llmcompress.model.draft_heads
from llmcompress.errors import CheckpointError
from llmcompress.model.draft_heads.base import DraftShape, HeadKind
from llmcompress.registry import discover
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import ModelHeaders, inside, read_file_header, read_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def head_kinds() -> dict[str, HeadKind]:
    """All kinds by name."""
    return discover(llmcompress.model.draft_heads, "HEAD")


def is_draft(path: Path) -> bool:
    """Whether a directory says that it holds a draft head."""
    if not (path / CONFIG).is_file():
        return False
    config = read_json(inside(path, path / CONFIG))
    return "speculators_model_type" in config or any(kind.recognises(config) for kind in head_kinds().values())


def read_draft(path: Path) -> tuple[DraftShape, Checkpoint]:
    """The sizes and the tensors of a draft head on disk; CheckpointError for what is not one, or is another kind."""
    place = inside(path, path / CONFIG)
    config = read_json(place)
    kind = next((kind for kind in head_kinds().values() if kind.recognises(config)), None)
    if kind is None:
        said = config.get("speculators_model_type", config.get("model_type"))
        raise CheckpointError(
            f"{path} holds a draft of type {said!r}, which is not known here", f"known: {', '.join(head_kinds())}"
        )
    shape = kind.read(place, config)
    file = inside(path, path / WEIGHTS)
    headers = ModelHeaders(path, config, read_file_header(file), (file,))
    found = {name: stored.spec.shape for name, stored in headers.tensors.items()}
    ids = {spec.name: spec.shape for spec in shape.id_specs if spec.name == shape.ids_name}
    for name, wanted in {**shape.matrices, **ids}.items():
        if found.get(name) != wanted:
            said = "is missing" if name not in found else f"is {list(found[name])}"
            raise CheckpointError(f"{file}: tensor {name} {said}, config.json asks for {list(wanted)}")
    return shape, Checkpoint(headers)
