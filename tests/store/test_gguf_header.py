"""GGUF files: read as the gguf package reads them; whatever lies, in one line, before it can do harm."""

import os
import struct
import subprocess
import sys
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.errors import CheckpointError
from llmcompress.store.gguf_header import GgufArray, read_header
from llmcompress.store.gguf_model import decoded, read_gguf, tensor_bytes

U32, F32, STRING, ARRAY = 4, 6, 8, 9  # value types


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key="a.key", kind=U32, raw=b"\1\0\0\0"):
    return text(key) + struct.pack("<I", kind) + raw


def info(name="a.weight", dims=(4, 2), kind=0, offset=0, n_dims=None):
    n_dims = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, kind, offset)


def build(pairs=(), infos=(), data=b"", counts=None, alignment=32, start=b"GGUF\3\0\0\0"):
    """A file from its parts; `counts` may differ from what there is."""
    raw = start + struct.pack("<QQ", *(counts or (len(infos), len(pairs)))) + b"".join([*pairs, *infos])
    return raw + b"\0" * (-len(raw) % alignment) + data


def refused(path, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        read_gguf(path)
    message = caught.value.message
    assert message.isprintable()
    assert path.name in message
    return message


@pytest.fixture
def write(tmp_path):
    """write(fields, tensors, **options): a file made by the gguf package."""

    def make(fields=(), tensors=(), name="model.gguf", alignment=None, **options):
        writer = gguf.GGUFWriter(tmp_path / name, "llama", **options)
        if alignment:
            writer.add_custom_alignment(alignment)
        for key, value, *types in fields:
            writer.add_key_value(key, value, *types)
        for tensor, array, *kind in tensors:
            writer.add_tensor(tensor, array, raw_dtype=kind[0] if kind else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return make


def same_as_the_package_reads(path):
    header, reader = read_header(path), gguf.GGUFReader(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.fields) == list(fields)
    for key, field in fields.items():
        assert header.fields[key].type == field.types[0].name
        value = header.value(key)
        if isinstance(value, np.ndarray):
            assert header.fields[key].value.type == field.types[-1].name
            value = value.tolist()
        np.testing.assert_equal(value, field.contents())
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor, own in zip(reader.tensors, header.tensors.values(), strict=True):
        assert (own.type_id, own.type) == (tensor.tensor_type.value, tensor.tensor_type.name)
        assert own.shape == tuple(tensor.shape.tolist()[::-1])
        assert (own.position, own.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert own.position == header.data_start + own.offset
        np.testing.assert_array_equal(tensor_bytes(header, own.name), tensor.data.reshape(-1).view(np.uint8))
    assert header.alignment == reader.alignment
    return header


SCALARS = {
    GGUFValueType.UINT8: st.integers(0, 2**8 - 1),
    GGUFValueType.INT8: st.integers(-(2**7), 2**7 - 1),
    GGUFValueType.UINT16: st.integers(0, 2**16 - 1),
    GGUFValueType.INT16: st.integers(-(2**15), 2**15 - 1),
    GGUFValueType.UINT32: st.integers(0, 2**32 - 1),
    GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1),
    GGUFValueType.UINT64: st.integers(0, 2**64 - 1),
    GGUFValueType.INT64: st.integers(-(2**63), 2**63 - 1),
    GGUFValueType.FLOAT32: st.floats(width=32),
    GGUFValueType.FLOAT64: st.floats(),
    GGUFValueType.BOOL: st.booleans(),
    GGUFValueType.STRING: st.text(st.characters(codec="utf-8"), max_size=9),
}
KEYS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=12)


@st.composite
def fields(draw):
    kind = draw(st.sampled_from([*SCALARS]))
    if draw(st.booleans()):
        return draw(SCALARS[kind]), kind
    return draw(st.lists(SCALARS[kind], min_size=1, max_size=6)), GGUFValueType.ARRAY, kind


@st.composite
def tensors(draw):
    kind = draw(st.sampled_from([*gguf.GGML_QUANT_SIZES]))
    nbytes = gguf.GGML_QUANT_SIZES[kind][1]
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    blocks = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).integers(0, 256, (*shape, blocks * nbytes), np.uint8), kind


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(KEYS.filter(lambda key: not key.startswith("GGUF.")), fields(), max_size=6),
    st.dictionaries(KEYS, tensors(), max_size=5),
    st.sampled_from([None, 1, 8, 64]),
)
def test_any_file_is_read_as_the_package_reads_it(tmp_path_factory, values, arrays, alignment):
    file = tmp_path_factory.mktemp("any") / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in values.items():
        writer.add_key_value(key, *value)
    for name, (array, kind) in arrays.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    same_as_the_package_reads(file)


def test_both_versions_are_read(write):
    file = write([("a", "text", GGUFValueType.STRING)], [("w", np.ones((2, 3), np.float32))])
    assert same_as_the_package_reads(file).version == 3
    file.write_bytes(file.read_bytes().replace(b"GGUF\3", b"GGUF\2"))
    assert same_as_the_package_reads(file).version == 2


@pytest.mark.parametrize("kind", [*gguf.GGML_QUANT_SIZES], ids=lambda kind: kind.name)
def test_values_are_decoded_or_the_type_is_refused(kind, write, monkeypatch):
    monkeypatch.setattr("llmcompress.store.gguf_model._DECODED_AT_ONCE", 512)  # to decode in several pieces
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (5, 3, 512 // block * nbytes), np.uint8)
    header = read_header(write(tensors=[("w", raw, kind)]))
    try:
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw, kind)
    except NotImplementedError:
        with pytest.raises(CheckpointError, match=f"tensor w has type {kind.name}, which gguf cannot decode"):
            decoded(header, "w")
        return
    found = decoded(header, "w")
    assert (found.dtype, found.shape) == (np.float32, (15, 512))
    np.testing.assert_array_equal(found, expected.reshape(15, 512))
    np.testing.assert_array_equal(decoded(header, "w", 4, 9), expected.reshape(15, 512)[4:9])


def test_plain_floats_come_back(write):
    values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    wide = (values.view(np.uint32) >> 16).astype("<u2")
    kinds = [("f", values), ("h", values.astype(np.float16)), ("b", wide.view(np.uint8), GGMLQuantizationType.BF16)]
    header = read_header(write(tensors=kinds))
    np.testing.assert_array_equal(decoded(header, "f"), values)
    np.testing.assert_array_equal(decoded(header, "h"), values.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(decoded(header, "b"), (wide.astype(np.uint32) << 16).view(np.float32))


def test_a_vocabulary_costs_nothing_unless_asked_for(write):
    tokens = [f"token {number}" for number in range(150_000)]
    file = write([("tokens", tokens, GGUFValueType.ARRAY), ("scores", [0.5] * 150_000, GGUFValueType.ARRAY)])
    read_header(file)
    begin = time.process_time()
    tracemalloc.start()
    try:
        header = read_header(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < 1
    assert peak < 100_000
    array = header.fields["tokens"].value
    assert isinstance(array, GgufArray)
    assert (array.type, array.count) == ("STRING", 150_000)
    assert header.value("tokens") == tokens
    assert header.value("scores").sum() == 75_000


def test_headers_are_read_without_torch(write):
    code = (
        "import sys; from pathlib import Path; from llmcompress.store.gguf_model import read_gguf\n"
        f"assert read_gguf(Path({str(write(tensors=[('w', np.ones(2, np.float32))]))!r})).tensors\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


DATA = b"\0" * 32
HUGE = 2**63


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not a GGUF file"),
        (b"GGUF", "not a GGUF file"),
        (b"GGML\3\0\0\0" + b"\0" * 16, "not a GGUF file"),
        (build(start=b"GGUF\0\0\0\3"), "big-endian"),
        (build(start=b"GGUF\1\0\0\0"), "version 1 of GGUF"),
        (build(start=b"GGUF\4\0\0\0"), "version 4 of GGUF"),
        (build(counts=(HUGE, 0)), "many times its size"),
        (build(counts=(0, HUGE)), "many times its size"),
        (build(counts=(5, 0)), "pass the end|a name of 0 bytes"),
        (build([pair(), pair()]), "the key a.key stands twice"),
        (build([pair(key="")]), "a name of 0 bytes"),
        (build([pair(key="k" * 65_536)]), "a name of 65,536 bytes"),
        (build([pair(key=b"\xff\xfe")]), "byte 32 is not UTF-8"),
        (build([pair(key="a\x1b[2J")]), "cannot be printed"),
        (build([pair(kind=13)]), "unknown type 13, in the value of a.key"),
        (build([pair(kind=2**32 - 1)]), "unknown type 4294967295"),
        (build([pair(kind=STRING, raw=struct.pack("<Q", HUGE))]), "pass the end"),
        (build([pair(kind=STRING, raw=text(b"\xff"))]), "is not UTF-8, in the value of a.key"),
        (build([pair(kind=ARRAY, raw=struct.pack("<IQ", F32, HUGE))]), "pass the end"),
        (build([pair(kind=ARRAY, raw=struct.pack("<IQ", STRING, HUGE))]), "texts at byte .* pass the end"),
        (build([pair(kind=ARRAY, raw=struct.pack("<IQQ", STRING, 2, HUGE))]), "texts at byte .* pass the end"),
        (build([pair(kind=ARRAY, raw=struct.pack("<IQ", ARRAY, 1))]), "an array of arrays"),
        (build([pair(kind=ARRAY, raw=struct.pack("<IQ", 99, 1))]), "unknown type 99"),
        (build([pair("general.alignment", raw=struct.pack("<I", 48))], [info()], DATA), "not a power of two"),
        (build([pair("general.alignment", raw=struct.pack("<I", 0))], [info()], DATA), "not a power of two"),
        (build([pair("general.alignment", 10, struct.pack("<Q", 32))], [info()], DATA), "not a power of two"),
        (build(infos=[info(kind=5)], data=DATA), "has type 5, which"),
        (build(infos=[info(kind=2**32 - 1)], data=DATA), "has type 4294967295"),
        (build(infos=[info(dims=(1,) * 5)], data=DATA), "5 dimensions; 4 at most"),
        (build(infos=[info(n_dims=2**32 - 1)], data=DATA), "4,294,967,295 dimensions"),
        (build(infos=[info(dims=(33, 2), kind=8)], data=DATA), r"shape \[2, 33\], which Q8_0 in blocks of 32"),
        (build(infos=[info(dims=(), kind=8)], data=DATA), r"shape \[\], which Q8_0"),
        (build(infos=[info(dims=(4, 0))], data=DATA), r"shape \[0, 4\], which F32"),
        (build(infos=[info(dims=(HUGE, HUGE))], data=DATA), "end before tensor a.weight does"),
        (build(infos=[info(name="n" * 64)], data=DATA), "a name of 64 bytes"),
        (build(infos=[info(name="")], data=DATA), "a name of 0 bytes"),
        (build(infos=[info(name=b"\xc3")], data=DATA), "not UTF-8"),
        (build(infos=[info(), info(offset=32)], data=DATA * 2), "tensor a.weight stands twice"),
        (build(infos=[info(), info("b", offset=0)], data=DATA), "tensor b begins at byte 0 of the data, not at 32"),
        (build(infos=[info(), info("b", offset=64)], data=DATA * 3), "tensor b begins at byte 64 .* not at 32"),
        (build(infos=[info(offset=32)], data=DATA * 2), "begins at byte 32 of the data, not at 0"),
        (build(infos=[info("b", offset=32), info()], data=DATA * 2), "tensor b begins at byte 32"),
        (build(infos=[info(offset=HUGE)], data=DATA), "begins at byte"),
        (build(infos=[info()], data=DATA[:-1]), "bytes of the file end before tensor a.weight does"),
        (build(infos=[info()], data=DATA + b"x"), "1 bytes belong to no tensor"),
        (build(infos=[info(), info("b", offset=32)], data=DATA * 2, counts=(1, 0)), "bytes belong to no tensor"),
        (build(data=b"x"), "1 bytes belong to no tensor"),
    ],
)
def test_a_header_that_lies_is_refused(raw, words, tmp_path):
    (tmp_path / "model.gguf").write_bytes(raw)
    refused(tmp_path / "model.gguf", words)


@pytest.mark.parametrize(
    "raw",
    [
        build(),
        build([pair(kind=ARRAY, raw=struct.pack("<IQ", STRING, 0))]),
        build(infos=[info(dims=())], data=b"\0" * 4),  # the last tensor's padding is not missed
        build(infos=[info(dims=(1, 1, 1, 8))], data=DATA),
        build([pair("general.alignment", raw=struct.pack("<I", 64))], [info()], DATA + DATA, alignment=64),
    ],
)
def test_what_is_unusual_but_right_is_read(raw, tmp_path):
    (tmp_path / "model.gguf").write_bytes(raw)
    header = same_as_the_package_reads(tmp_path / "model.gguf") if b"a.key" not in raw else None
    assert header is not None or read_header(tmp_path / "model.gguf").value("a.key") == []


def test_a_file_cut_anywhere_is_refused(write):
    file = write(
        [("texts", ["a", "b"], GGUFValueType.ARRAY), ("t", "x", GGUFValueType.STRING)],
        [("a", np.ones(8, np.float32)), ("b", np.ones(8, np.float32))],
    )
    whole = file.read_bytes()
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        refused(file, "GGUF")


def test_a_flipped_bit_is_refused_or_leaves_a_file_that_hangs_together(write):
    file = write(
        [("t", "x", GGUFValueType.STRING)], [("a", np.ones((2, 4), np.float32)), ("b", np.ones(8, np.float32))]
    )
    whole, start, read = file.read_bytes(), read_header(file).data_start, 0
    for bit in range(start % 8, 8 * start, 3):  # every bit of a byte in its turn
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            header = read_header(file)
        except CheckpointError:
            continue
        read += 1
        ends = [tensor.position + tensor.nbytes for tensor in header.tensors.values()]
        assert ends == sorted(ends)
        assert ends[-1] <= len(whole)
    assert 0 < read < 4 * start / 3  # names, numbers, padding


@pytest.mark.parametrize("count", [2**20, 2**24])
def test_a_hole_of_a_terabyte_takes_neither_time_nor_memory(count, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(build([pair(kind=ARRAY, raw=struct.pack("<IQ", STRING, 2**36))], [info()]))
    os.truncate(file, 2**40)
    begin = time.process_time()
    refused(file, "pass the end at byte 134,217,728")
    file.write_bytes(build(counts=(count, count)))
    os.truncate(file, 2**40)
    refused(file, "a name of 0 bytes")
    assert time.process_time() - begin < 10


def test_small_entries_in_great_number_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(build([pair(f"{number:04x}", 0, b"\0") for number in range(60_000)]))
    tracemalloc.start()
    try:
        refused(file, "many times its size")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_refused(tmp_path):
    refused(tmp_path / "none.gguf", "does not exist")
    refused(tmp_path, "is not a file")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "is not a file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_gguf(tmp_path / "a\0b.gguf")


def test_a_big_endian_file_of_the_package_is_refused(write):
    refused(write(endianess=gguf.GGUFEndian.BIG), "big-endian")


def test_unknown_names_and_changed_files_are_refused(write):
    file = write([("texts", ["a"], GGUFValueType.ARRAY)], [("w", np.ones(2, np.float32))])
    header = read_header(file)
    for ask, words in ((header.value, "no value for x"), (lambda name: tensor_bytes(header, name), "no tensor x")):
        with pytest.raises(CheckpointError, match=words):
            ask("x")
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"\1\0\0\0\0\0\0\0a", b"\1\0\0\0\0\0\0\0\xff"))
    with pytest.raises(CheckpointError, match=r"damaged values of texts: the text at byte \d+ is not UTF-8"):
        header.value("texts")
    file.write_bytes(whole[:40])
    for ask in (lambda: header.value("texts"), lambda: tensor_bytes(header, "w"), lambda: decoded(header, "w")):
        with pytest.raises(CheckpointError, match="has changed"):
            ask()


@pytest.fixture
def shards(write, tmp_path):
    """A model of five tensors in three files, as the package splits it."""
    arrays = [(f"w{number}", np.full((2, 4), number, np.float32)) for number in range(5)]
    write([("a.key", 7, GGUFValueType.UINT32)], arrays, split_max_tensors=2)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return files


@pytest.mark.parametrize("given_", [0, 1, 2])
def test_shards_are_found_from_any_of_them(given_, shards):
    header = read_gguf(shards[given_])
    assert header.files == tuple(shards)
    assert header.value("a.key") == 7
    assert list(header.tensors) == [f"w{number}" for number in range(5)]
    for number in range(5):
        np.testing.assert_array_equal(decoded(header, f"w{number}"), np.full((2, 4), number))


def test_a_missing_shard_is_named(shards):
    shards[1].unlink()
    refused(shards[0], "model-00002-of-00003.gguf is missing, a shard of the model of model-00001")


def test_a_shard_under_another_name_is_refused(shards, tmp_path):
    for name in ("model.gguf", "model-00002-of-00003.gguf", "model-00001-of-00004.gguf"):
        refused(shards[0].rename(tmp_path / name), "is shard 1 of 3, but its name does not say so")
        (tmp_path / name).rename(shards[0])


def test_shards_of_different_models_are_refused(shards, write, tmp_path):
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is not shard 2"):
        read_gguf(shards[0])
    (tmp_path / "other").mkdir()
    write([], [(f"w{n}", np.ones(4, np.float32)) for n in (0, 9, 0.5)], name="other/model.gguf", split_max_tensors=1)
    (tmp_path / "other" / shards[1].name).rename(shards[1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is not shard 2"):
        read_gguf(shards[0])


def test_a_tensor_in_two_shards_is_refused(shards):
    shards[1].write_bytes(shards[1].read_bytes().replace(b"w2", b"w0"))
    with pytest.raises(CheckpointError, match=r"w0 stands in both .*00001-of-00003\.gguf and model-00002"):
        read_gguf(shards[2])


def test_a_tensor_in_no_shard_is_refused(shards):
    for shard in shards:
        total = struct.pack("<i", 5)
        at = shard.read_bytes().index(b"split.tensors.count") + len("split.tensors.count") + 4
        assert shard.read_bytes()[at : at + 4] == total
        shard.write_bytes(shard.read_bytes()[:at] + struct.pack("<i", 6) + shard.read_bytes()[at + 4 :])
    refused(shards[0], "its shards have 5 tensors, not 6")


def test_a_shard_that_leads_out_of_the_directory_is_refused(shards, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.gguf"
    shards[1].rename(elsewhere)
    shards[1].symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="is a link that leaves the model directory"):
        read_gguf(shards[0])


def test_split_keys_of_other_types_are_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(build([pair("split.count", F32, struct.pack("<f", 3))]))
    refused(tmp_path / "model.gguf", "split.count of type FLOAT32, not a whole number")
