"""JSON that carries the SHA-256 of its content, so that a flipped bit is not taken for a value."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

_KEY = "sha256"


def sealed(data: Mapping[str, Any]) -> bytes:
    """The JSON of `data` with its hash; the same bytes for the same data."""
    return (json.dumps({**data, _KEY: _hash(data)}, indent=1) + "\n").encode()


def unsealed(raw: bytes) -> dict[str, Any]:
    """The data of sealed JSON; ValueError if it is not what was written."""
    try:
        return content_of(json.loads(raw))
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def content_of(data: Any) -> dict[str, Any]:
    """The data of sealed JSON that is parsed already; ValueError if it is not what was written."""
    if not isinstance(data, dict) or data.pop(_KEY, None) != _hash(data):
        raise ValueError("it is not what was written")
    return data


def _hash(data: Any) -> str:
    plain = json.loads(json.dumps(data))  # keys of numbers are text from here on
    return sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
