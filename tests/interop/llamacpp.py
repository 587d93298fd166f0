"""llama.cpp's C interface, through the shared library inside the wheel of xllamacpp.

The layout of two structs is that of `VERSION`; another version is refused rather than misread.
"""

import ctypes
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest

VERSION = "2026.10.11549"
_MODEL_PARAMS, _CONTEXT_PARAMS = 80, 168  # sizes of llama_model_params and llama_context_params
_VOCAB_ONLY = 72


class _ModelParams(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_uint64 * (_MODEL_PARAMS // 8)),)


class _ContextParams(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_uint64 * (_CONTEXT_PARAMS // 8)),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_log: list[str] = []
_keep = _LOG(lambda level, text, data: _log.append(text.decode(errors="replace")))


def library() -> ctypes.CDLL:
    """The library; skips the test where the wheel is not there."""
    try:
        found = version("xllamacpp")
    except PackageNotFoundError:
        pytest.skip(f"needs pip install --no-deps xllamacpp=={VERSION}")
    if found != VERSION:
        pytest.fail(f"xllamacpp is {found}; these tests know the structs of {VERSION}")
    from xllamacpp import xllamacpp

    lib = ctypes.CDLL(xllamacpp.__file__)
    pointer, text, number, flag = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_bool
    signatures = {
        "llama_log_set": (None, [_LOG, pointer]),
        "llama_model_default_params": (_ModelParams, []),
        "llama_context_default_params": (_ContextParams, []),
        "llama_model_load_from_file": (pointer, [text, _ModelParams]),
        "llama_init_from_model": (pointer, [pointer, _ContextParams]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_model_free": (None, [pointer]),
        "llama_free": (None, [pointer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, flag]),
        "llama_decode": (number, [pointer, _Batch]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [pointer, number]),
        "llama_vocab_n_tokens": (number, [pointer]),
        "llama_vocab_get_text": (text, [pointer, number]),
        "llama_vocab_is_eog": (flag, [pointer, number]),
        **{f"llama_vocab_{name}": (number, [pointer]) for name in ("bos", "eos", "eot", "pad")},
        **{f"llama_vocab_get_add_{name}": (flag, [pointer]) for name in ("bos", "eos")},
        "llama_tokenize": (number, [pointer, text, number, pointer, number, flag, flag]),
        "llama_token_to_piece": (number, [pointer, number, pointer, number, number, flag]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.llama_log_set(_keep, None)
    lib.llama_backend_init()
    return lib


class Llama:
    """A GGUF file in llama.cpp. vocab_only: the file needs no tensors, and only text and ids work."""

    def __init__(self, file: Path, vocab_only: bool = False, length: int = 512, threads: int = 1) -> None:
        self.lib = library()
        params = self.lib.llama_model_default_params()
        ctypes.memset(ctypes.addressof(params) + _VOCAB_ONLY, int(vocab_only), 1)
        _log.clear()
        self.model = self.lib.llama_model_load_from_file(str(file).encode(), params)
        assert self.model, "".join(_log[-20:])
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.context = None
        if not vocab_only:
            params = self.lib.llama_context_default_params()
            numbers = ctypes.cast(ctypes.addressof(params), ctypes.POINTER(ctypes.c_int32))
            numbers[0] = numbers[1] = numbers[2] = length  # n_ctx, n_batch, n_ubatch
            numbers[7] = numbers[8] = threads
            self.context = self.lib.llama_init_from_model(self.model, params)
            assert self.context, "".join(_log[-20:])

    def close(self) -> None:
        if self.context:
            self.lib.llama_free(self.context)
        if self.model:
            self.lib.llama_model_free(self.model)
        self.model = self.context = None

    def __enter__(self) -> "Llama":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ids(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`."""
        raw = text.encode()
        room = len(raw) + 8
        found = (ctypes.c_int32 * room)()
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), found, room, add_special, parse_special)
        assert count >= 0, text
        return list(found[:count])

    def text(self, ids: list[int], special: bool = True) -> str:
        """The pieces of `ids` put together."""
        room = ctypes.create_string_buffer(4096)
        raw = b""
        for token in ids:
            count = self.lib.llama_token_to_piece(self.vocab, token, room, len(room), 0, special)
            assert count >= 0
            raw += room.raw[:count]
        return raw.decode(errors="replace")

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits [tokens, vocabulary] float32 of one sequence, computed afresh."""
        assert self.context, "loaded with vocab_only"
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        tokens, wanted = (ctypes.c_int32 * len(ids))(*ids), (ctypes.c_int8 * len(ids))(*[1] * len(ids))
        batch = _Batch(n_tokens=len(ids), token=ctypes.addressof(tokens), logits=ctypes.addressof(wanted))
        status = self.lib.llama_decode(self.context, batch)
        assert status == 0, "".join(_log[-20:])
        width = self.lib.llama_vocab_n_tokens(self.vocab)
        rows = [self.lib.llama_get_logits_ith(self.context, row) for row in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (width,)).copy() for row in rows])

    def generate(self, ids: list[int], count: int) -> list[int]:
        """The `count` likeliest next tokens, one after the other; ends early at a token that ends generation."""
        ids, start = list(ids), len(ids)
        while len(ids) < start + count:
            ids.append(int(self.logits(ids)[-1].argmax()))
            if self.lib.llama_vocab_is_eog(self.vocab, ids[-1]):
                break
        return ids[start:]
