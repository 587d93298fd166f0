"""The key-values of a GGUF file compared with those that its source gives."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmcompress.engine.plan.gguf_plan import gguf_model
from llmcompress.engine.source.gguf_input import GgufHeaders, carried_keys
from llmcompress.grids.ggml import GgufTypes
from llmcompress.ledger import Ledger
from llmcompress.recipe import Output, build
from llmcompress.store.gguf_header import GgufArray, GgufHeader, scalar_value
from llmcompress.store.headers import ModelHeaders

_OF_THE_RUN = ("split.", "quantize.imatrix.", "general.file_type")  # beginnings of keys that no source has
_SAID = ("pre", "base_model", "license")  # what a recipe says of an output that its keys tell
_BY_PATH = {f"general.{key}" for key in ("name", "version", "organization", "finetune", "basename", "size_label")}
"""Keys that are made of the name of the source's directory, which may have another one now."""


def key_wrongs(header: GgufHeader, source: ModelHeaders, report: Mapping[str, Any]) -> list[str]:
    """Keys of a file that are not those its source gives."""
    expected = _expected(header, source, report)
    passed = set() if isinstance(source, GgufHeaders) else _BY_PATH
    names = {name for name in header.fields.keys() | expected.keys() if not name.startswith(_OF_THE_RUN)} - passed
    wrong = [f"there is no {name}" for name in sorted(names - header.fields.keys())]
    wrong += [f"{name} does not come from the source" for name in sorted(names - expected.keys())]
    for name in sorted(names & header.fields.keys() & expected.keys()):
        if not _same(header, name, expected[name]):
            wrong.append(f"{name} is not that of the source")
    return wrong


def _expected(header: GgufHeader, source: ModelHeaders, report: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the gguf package keeps them to write, by key; CheckpointError where the source gives none."""
    from gguf import GGUFWriter

    writer = GGUFWriter(None, str(scalar_value(header, "general.architecture")))
    if isinstance(source, GgufHeaders):
        carried_keys(source, 0)(writer)
    else:
        recipe = report.get("recipe")
        output = recipe.get("output") if isinstance(recipe, Mapping) else None
        said = {name: output[name] for name in _SAID if name in output} if isinstance(output, Mapping) else {}
        gguf_model(
            source, GgufTypes(type="F32"), build(Output, said, "the output of the report"), False, Ledger()
        ).describe(writer)
    return dict(writer.kv_data[0])


def _same(header: GgufHeader, name: str, expected: Any) -> bool:
    """Whether a key has the type and the value that are expected."""
    field = header.fields[name]
    kind = field.value.type if isinstance(field.value, GgufArray) else field.type
    wanted = expected.sub_type if isinstance(field.value, GgufArray) else expected.type
    found = header.value(name)
    if isinstance(expected.value, list) != isinstance(field.value, GgufArray):
        return False
    if wanted is not None and wanted.name != kind:
        return False
    if kind == "FLOAT32":
        return bool(np.array_equal(np.asarray(found, np.float32), np.asarray(expected.value, np.float32)))
    return bool((found if isinstance(found, list | str) else np.asarray(found).tolist()) == expected.value)
