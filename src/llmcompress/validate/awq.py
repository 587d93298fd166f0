"""The words of awq checkpoints, and how each engine reads their config, for `verify`.

A second reader (see `matrices`): imports nothing that takes part in writing, on purpose.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from llmcompress.validate.stored import Array

KEYS = ("bits", "group_size", "zero_point", "version", "modules_to_not_convert")
_SHIFTS = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)  # bit offsets of a word's eight outputs


def nibbles(words: Array) -> Array:
    """Values uint8 [rows, 8 * count] of int32 words [rows, count]."""
    spread = np.ascontiguousarray(words).astype("<i4").view("<u4")[:, :, None] >> _SHIFTS
    values: Array = (spread & 15).astype(np.uint8).reshape(words.shape[0], -1)
    return values


def skipped(module: str, settings: Mapping[str, Any]) -> set[bool]:
    """Whether engines leave a linear unquantised: {True} or {False} where all engines agree, else both."""
    listed = settings["modules_to_not_convert"]
    said = {
        any(name in module for name in listed),  # vLLM, SGLang, AutoAWQ
        any(re.match(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(name) for name in listed),
    }
    if re.search(r"(^|\.)\d+\.", module):  # GPTQModel leaves out what lies outside of layers by itself
        rules = settings.get("dynamic") or {}
        said.add(any(rule.startswith("-:") and bool(re.match(rule[2:], module)) for rule in rules))
    return said


def config_wrongs(settings: Mapping[str, Any], linears: Iterable[str]) -> list[str]:
    """Faults of a quantization_config, given the names of all linears."""
    wrong = [f"quantization_config has no {key!r}" for key in KEYS if key not in settings]
    if wrong:
        return wrong
    if settings["bits"] != 4:
        wrong.append(f"bits is {settings['bits']}")
    if settings["version"] != "gemm":
        wrong.append(f"version is {settings['version']!r}")
    return wrong + [
        f"engines do not agree on whether {module} is quantised"
        for module in sorted(linears)
        if len(skipped(module, settings)) > 1
    ]
