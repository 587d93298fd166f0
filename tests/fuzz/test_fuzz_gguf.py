"""Damaged GGUF files and importance matrices: refused in one line, or read as what they are."""

import struct

import gguf
import numpy as np
import pytest

from llmcompress.formats.gguf.imatrix import Imatrix, ImatrixEntry, floored
from llmcompress.formats.gguf.imatrix_file import read_imatrix, write_imatrix, write_legacy
from llmcompress.store.gguf_header import read_header
from llmcompress.store.gguf_model import decoded, read_gguf, rows_of
from mutations import INPUTS, damaged, fuzz, measured

NUMBERS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 32, 33, 64, 255, 2**16, 2**27, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
NUMBERS += [2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def model(path):
    """A small file with a value of every kind and tensors of several types."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(32)
    for number, kind in enumerate(gguf.GGUFValueType):
        if kind not in (gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY):
            writer.add_key_value(f"k{number}", 1, kind)
            writer.add_key_value(f"a{number}", [1, 0], gguf.GGUFValueType.ARRAY, kind)
    writer.add_array("texts", ["a", "bc", "é漢😀"])
    writer.add_string("text", "漢字 {{ template }}")
    writer.add_uint16("split.count", 1)
    for kind in (0, 1, 8, 12, 14, 22, 26, 30, 39):
        kind = gguf.GGMLQuantizationType(kind)
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.arange(512 // block * nbytes, dtype=np.uint8)
        writer.add_tensor(f"w{kind}", raw.reshape(2, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def numbers_of(whole, end):
    """Where in front of `end` the bytes read as a small number: lengths, counts, types, offsets, and a few others."""
    return [at for at in range(end) if whole[at : at + 2] != b"\0\0" and whole[at + 2 : at + 4] == b"\0\0"]


def spoilt(whole, end, places, dice):
    """Other numbers at up to three places, or damaged bytes in front of `end` or anywhere."""
    kind = dice.below(4)
    if kind > 1:
        end = end if kind == 2 else len(whole)
        return damaged(whole[:end], dice) + whole[end:]
    out = bytearray(whole)
    for _ in range(dice.below(3) + 1):
        at, number = dice.choose(places), dice.choose(NUMBERS)
        if dice.below(2):
            out[at : at + 4] = struct.pack("<I", number % 2**32)
        else:
            out[at : at + 8] = struct.pack("<Q", number)
    return bytes(out)


@INPUTS
def test_damaged_models(inputs, tmp_path):
    file = tmp_path / "model.gguf"
    whole = model(file)
    start = read_header(file).data_start
    places = numbers_of(whole, start)

    def check(dice):
        file.write_bytes(spoilt(whole, start, places, dice))
        size = file.stat().st_size
        header = measured(lambda: read_gguf(file), size)
        if header is None:
            return
        end = header.data_start
        for name, tensor in header.tensors.items():  # within the file, in order, without overlap
            assert tensor.position >= end
            end = tensor.position + tensor.nbytes
            values = measured(lambda name=name: decoded(header, name), 8 * size)
            assert values is None or values.shape == (rows_of(header, name), (tensor.shape or (1,))[-1])
        assert not header.tensors or end <= size < end + header.alignment
        for key in header.fields:
            measured(lambda key=key: header.value(key), size)

    fuzz(inputs, check)


@INPUTS
@pytest.mark.parametrize("write", [write_imatrix, write_legacy])
def test_damaged_importance_matrices(inputs, write, tmp_path):
    file = tmp_path / "imatrix"
    entries = {
        f"blk.{layer}.{name}.weight": ImatrixEntry(
            np.arange(8 * experts, dtype=np.float32).reshape(experts, 8), np.full(experts, 512, np.float32)
        )
        for layer in range(2)
        for name, experts in (("attn_k", 1), ("ffn_down_exps", 4))
    }
    write(file, Imatrix(entries, ("text",), 2, 512))
    whole = file.read_bytes()
    places = numbers_of(whole, len(whole))

    def check(dice):
        file.write_bytes(spoilt(whole, len(whole), places, dice))
        found = measured(lambda: read_imatrix(file), file.stat().st_size)
        if found is not None:
            for entry in found.entries.values():
                importance = floored(entry).importance
                assert np.isfinite(importance).all()
                assert (importance > 0).all()

    fuzz(inputs, check)
