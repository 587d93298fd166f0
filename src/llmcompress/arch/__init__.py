"""What model families look like, one declaration per file; no computing."""

import sys
from collections.abc import Mapping
from functools import cache

from llmcompress.arch.spec import ArchSpec
from llmcompress.registry import discover


def find(model_type: str) -> ArchSpec | None:
    """The declaration of a config.json's `model_type`, or None where there is none."""
    return _by_model_type().get(model_type)


@cache
def _by_model_type() -> Mapping[str, ArchSpec]:
    found: dict[str, ArchSpec] = {}
    for spec in discover(sys.modules[__name__], "ARCH").values():
        for model_type in spec.model_types:
            if model_type in found:
                raise RuntimeError(f"{model_type!r} is declared by both {found[model_type].name} and {spec.name}")
            found[model_type] = spec
    return found
