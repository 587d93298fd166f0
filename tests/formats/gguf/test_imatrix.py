"""Importance matrices: files of both kinds against independent readers and hand-made bytes, sums against the text."""

import struct
import zlib

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcompress.errors import CalibrationError, LlmcompressError, PlanError
from llmcompress.formats.gguf.imatrix import Imatrix, ImatrixEntry, check, floored, merge, split_experts
from llmcompress.formats.gguf.imatrix_file import read_imatrix, write_imatrix, write_legacy

DENSE, EXPERTS = "blk.0.attn_k.weight", "blk.0.ffn_up_exps.weight"


def entry(sum2, counts):
    return ImatrixEntry(np.array(sum2, np.float32), np.array(counts, np.float32))


def imatrix(**entries):
    return Imatrix(entries or {DENSE: entry([[2, 4, 6]], [2])}, ("a text",), 3, 512)


@pytest.fixture
def example():
    """A dense tensor and one of three experts, of which the second saw nothing."""
    random = np.random.default_rng(0)
    sums = random.random((3, 8)).astype(np.float32) * 1e3
    sums[1] = 0
    entries = {EXPERTS: entry(sums, [700, 0, 324]), DENSE: entry(random.random((1, 5)) * 1e4, [1024])}
    return Imatrix(entries, ("one", "zwei 二"), 2, 512)


def legacy(*entries, trailer=(2, b"text")):
    raw = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        raw += struct.pack(f"<i{len(name)}sii{len(values)}f", len(name), name, calls, len(values), *values)
    return raw + (struct.pack(f"<ii{len(trailer[1])}s", trailer[0], len(trailer[1]), trailer[1]) if trailer else b"")


def same(one, other):
    assert list(one.entries) == list(other.entries)
    for name, item in one.entries.items():
        np.testing.assert_array_equal(item.sum2, other.entries[name].sum2)
        np.testing.assert_array_equal(item.counts, other.entries[name].counts)
    assert (one.datasets, one.chunk_count, one.chunk_size) == (other.datasets, other.chunk_count, other.chunk_size)


def test_chunks_of_a_legacy_file_are_those_of_512_tokens(tmp_path):
    short = Imatrix({DENSE: entry([[2048, 1024]], [1024])}, ("short",), 16, 64)
    write_legacy(tmp_path / "i.dat", short)
    found = read_imatrix(tmp_path / "i.dat")
    assert (found.chunk_count, found.chunk_size, found.entries[DENSE].counts.tolist()) == (2, 512, [1024])
    np.testing.assert_allclose(found.entries[DENSE].importance, short.entries[DENSE].importance)


def test_the_gguf_file_is_what_its_own_reader_expects(example, tmp_path):
    write_imatrix(tmp_path / "i.gguf", example)
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert values == {
        "general.type": "imatrix",
        "llmcompress.sha256": values["llmcompress.sha256"],
        "imatrix.datasets": ["one", "zwei 二"],
        "imatrix.chunk_count": 2,
        "imatrix.chunk_size": 512,
    }
    assert reader.fields["imatrix.chunk_count"].types == [gguf.GGUFValueType.UINT32]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors) == [f"{name}.{part}" for name in (DENSE, EXPERTS) for part in ("in_sum2", "counts")]
    assert tensors[f"{EXPERTS}.in_sum2"].shape.tolist() == [8, 3]
    assert tensors[f"{EXPERTS}.counts"].shape.tolist() == [1, 3]
    np.testing.assert_array_equal(tensors[f"{EXPERTS}.in_sum2"].data, example.entries[EXPERTS].sum2)
    np.testing.assert_array_equal(tensors[f"{EXPERTS}.counts"].data[:, 0], [700, 0, 324])


def test_what_is_written_is_read_and_twice_the_same_bytes(example, tmp_path):
    write_imatrix(tmp_path / "one", example)
    found = read_imatrix(tmp_path / "one")
    same(found, Imatrix(dict(sorted(example.entries.items())), example.datasets, 2, 512))
    write_imatrix(tmp_path / "two", found)  # entries in another order than the first time
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one", "two"]


def test_extents_of_one_may_be_left_out(tmp_path):
    """As ggml writes them: [n, 1] has one dimension in the file."""
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", "x")
    writer.add_array("imatrix.datasets", ["t"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 64)
    writer.add_tensor(f"{DENSE}.in_sum2", np.array([2, 6, 0], np.float32))
    writer.add_tensor(f"{DENSE}.counts", np.array([2], np.float32))
    writer.add_tensor(f"{DENSE}.in_sum", np.array([2, 6, 0], np.float32))  # from a newer program
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(read_imatrix(tmp_path / "i.gguf").importance(DENSE), [[1, 3, 0]])


@pytest.mark.parametrize("trailer", [(2, b"text"), None])
def test_legacy_bytes_are_read(trailer, tmp_path):
    raw = legacy((DENSE.encode(), 4, [2, 4, 0.5]), (b"output.weight", 7, [7]), trailer=trailer)
    (tmp_path / "i.dat").write_bytes(raw)
    found = read_imatrix(tmp_path / "i.dat")
    np.testing.assert_array_equal(found.importance(DENSE), [[0.5, 1, 0.125]])
    np.testing.assert_array_equal(found.importance("output.weight"), [[1]])
    assert (found.datasets, found.chunk_count) == ((("text",), 2) if trailer else ((), 7))


def test_legacy_bytes_are_written(tmp_path):
    item = entry([[1024, 3072], [0, 0], [512, 0]], [1024, 0, 512])
    write_legacy(tmp_path / "i.dat", Imatrix({EXPERTS: item}, ("a", "text"), 2, 512))
    expected = legacy((EXPERTS.encode(), 2, [2, 6, 2, 2, 2, 0]))  # an expert without data: ones, times the calls
    checksum = b"CRC\0" + struct.pack("<I", zlib.crc32(expected))  # which other programs do not read
    assert (tmp_path / "i.dat").read_bytes() == expected + checksum


def test_legacy_files_give_back_the_means(example, tmp_path):
    write_legacy(tmp_path / "i.dat", example)
    wanted = {DENSE: (5, 1), EXPERTS: (8, 3)}
    found = read_imatrix(tmp_path / "i.dat")
    assert found.entries[EXPERTS].sum2.shape == (1, 24)
    assert check(found, wanted) == ((), ())
    found = split_experts(found, wanted)
    np.testing.assert_allclose(found.importance(DENSE), example.importance(DENSE), rtol=1e-6)
    np.testing.assert_allclose(found.importance(EXPERTS)[[0, 2]], example.importance(EXPERTS)[[0, 2]], rtol=1e-6)
    np.testing.assert_array_equal(found.importance(EXPERTS)[1], np.ones(8))


@given(st.lists(st.integers(1, 40), min_size=2, max_size=5), st.integers(0, 2**32 - 1))
def test_a_merge_is_the_importance_of_all_the_text(lengths, seed):
    random = np.random.default_rng(seed)
    texts = [random.standard_normal((length, 6)) for length in lengths]
    parts = [
        Imatrix({DENSE: entry([np.square(text).sum(0)], [len(text)])}, (f"text {at % 2}",), 1, len(text))
        for at, text in enumerate(texts)
    ]
    merged = merge(parts)
    expected = np.square(np.concatenate(texts)).mean(0)
    np.testing.assert_allclose(merged.importance(DENSE), [expected], rtol=1e-5)
    assert merged.datasets == ("text 0", "text 1")
    assert merged.chunk_count == -(-sum(lengths) // lengths[0])


def test_a_merge_takes_what_only_one_has_and_refuses_other_sizes():
    other = Imatrix({"blk.1.attn_k.weight": entry([[1]], [1])}, (), 1, 512)
    assert list(merge([other, imatrix()]).entries) == [DENSE, "blk.1.attn_k.weight"]
    with pytest.raises(CalibrationError, match=r"attn_k.weight has \[1, 3\] columns in one and \[1, 4\]"):
        merge([imatrix(), imatrix(**{DENSE: entry([[1, 2, 3, 4]], [1])})])


def test_missing_and_foreign_names_are_told(example):
    wanted = {"blk.1.attn_k.weight": (5, 1), DENSE: (5, 1), "blk.0.attn_q.weight": (5, 1)}
    assert check(example, wanted) == (("blk.1.attn_k.weight", "blk.0.attn_q.weight"), (EXPERTS,))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"blk.0.attn_q.weight": (5, 1)}, "has blk.0.ffn_up_exps.weight, for example, but not blk.0.attn_q.weight"),
        ({DENSE: (6, 1)}, "attn_k.weight has 1 x 5 columns there, and 1 x 6"),
        ({EXPERTS: (8, 4)}, "3 x 8 columns there, and 4 x 8"),
        ({EXPERTS: (24, 1)}, "3 x 8 columns there, and 1 x 24"),
    ],
)
def test_the_matrix_of_another_model_is_refused(example, wanted, words):
    with pytest.raises(CalibrationError, match=words) as caught:
        check(example, wanted)
    assert caught.value.hint


def test_columns_without_data_get_a_little():
    found = floored(entry([[0, 4, 8, 12, 1e-6, 4e9]], [4]))
    np.testing.assert_allclose(found.importance, [[2.0e-3, 1, 2, 3, 2.0e-3, 1e9]], rtol=1e-6)
    assert (found.columns, found.experts, found.source) == (2, (), None)


def test_experts_without_data_get_the_mean_of_the_others(example):
    found = floored(example.entries[EXPERTS])
    resources = example.importance(EXPERTS)
    np.testing.assert_allclose(found.importance[1], (resources[0] + resources[2]) / 2, rtol=1e-6)
    np.testing.assert_array_equal(found.importance[[0, 2]], resources[[0, 2]])
    assert (found.columns, found.experts, found.source) == (0, (1,), "mean of the others")


def test_without_any_data_there_are_ones():
    found = floored(entry([[0, 0], [0, 0]], [0, 9]))
    np.testing.assert_array_equal(found.importance, np.ones((2, 2)))
    assert (found.columns, found.experts, found.source) == (0, (0, 1), "ones")


@given(st.lists(st.lists(st.floats(0, 2.0**120, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_floored_importance_is_above_zero_and_never_lower(sums):
    item = entry(sums, [1] * len(sums))
    importance = floored(item).importance
    assert (importance > 0).all()
    assert np.isfinite(importance).all()
    assert (importance >= item.importance).all()


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (entry([[1, np.nan]], [1]), "sums that are not finite"),
        (entry([[1, np.inf]], [1]), "sums that are not finite"),
        (entry([[1, -1]], [1]), "sums below zero"),
        (entry([[1, 1]], [np.inf]), "counts that are not finite"),
        (entry([[1, 1]], [-1]), "counts below zero"),
        (entry([[1, 1]], [1e-30]), "counts below one"),
        (entry([[1, 1]], [0]), "sums without a count"),
        (entry([[1, 1]], [1, 1]), r"sums \[1, 2\] for counts \[2\]"),
        (entry([1, 1], [1, 1]), r"sums \[2\] for counts \[2\]"),
    ],
)
def test_values_that_no_text_gives_are_refused(item, words):
    with pytest.raises(CalibrationError, match=f"{DENSE} has {words}"):
        imatrix(**{DENSE: item})


def test_damage_names_the_file(example, tmp_path):
    write_imatrix(tmp_path / "i.gguf", example)
    raw = (tmp_path / "i.gguf").read_bytes()
    first = example.entries[DENSE].sum2.tobytes()
    (tmp_path / "i.gguf").write_bytes(raw.replace(first, np.full(5, np.nan, np.float32).tobytes()))
    with pytest.raises(CalibrationError, match=rf"i\.gguf: .* {DENSE} has sums that are not finite"):
        read_imatrix(tmp_path / "i.gguf")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"imatrix.chunk_size", b"imatrix.chunk_sizE", "no imatrix.chunk_size"),
        (b"attn_k.weight.counts", b"attn_k.weight.countz", r"no blk\.0\.attn_k\.weight\.counts"),
        (b".in_sum2", b".in_sum3", "no tensor"),
    ],
)
def test_a_file_with_something_missing_is_refused(old, new, words, example, tmp_path):
    write_imatrix(tmp_path / "i.gguf", example)
    (tmp_path / "i.gguf").write_bytes((tmp_path / "i.gguf").read_bytes().replace(old, new))
    with pytest.raises(CalibrationError, match=words):
        read_imatrix(tmp_path / "i.gguf")


def test_a_model_is_no_importance_matrix(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("a.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CalibrationError, match=r"model\.gguf is not a whole importance matrix: it has no imatrix"):
        read_imatrix(tmp_path / "model.gguf")


def test_a_legacy_file_cut_anywhere_is_refused(tmp_path):
    file = tmp_path / "i.dat"
    entries = [(DENSE.encode(), 4, [2, 4]), (b"output.weight", 7, [7])]
    whole = legacy(*entries)
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        if whole[:end] == legacy(*entries, trailer=None):
            assert len(read_imatrix(file).entries) == 2
        else:
            with pytest.raises(CalibrationError, match=r"i\.dat is not a whole importance matrix"):
                read_imatrix(file)
    file.write_bytes(whole + b"x")
    with pytest.raises(CalibrationError, match="1 bytes follow"):
        read_imatrix(file)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"a": "' + b"x" * 100,
        legacy((DENSE.encode(), 0, [1])),
        legacy((DENSE.encode(), 1, [])),
        legacy((DENSE.encode(), 1, [1]), (DENSE.encode(), 1, [1])),
        legacy((b"\xff\xfe", 1, [1])),
        legacy((b"a\x1b[2J", 1, [1])),
        legacy((b"a", 1, [1]), trailer=(-1, b"text")),
        legacy((b"a", 1, [3e38])),
        struct.pack("<ii", 1, -1) + b"\0" * 40,
        struct.pack("<ii1sii", 1, 1, b"a", 1, -1) + b"\0" * 40,
        struct.pack("<ii1sii", 1, 1, b"a", 1, 2**31 - 1) + b"\0" * 40,
    ],
)
def test_damaged_legacy_files_are_refused(raw, tmp_path):
    (tmp_path / "i.dat").write_bytes(raw)
    with pytest.raises(LlmcompressError, match=r"i\.dat") as caught:
        read_imatrix(tmp_path / "i.dat")
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("write", [write_imatrix, write_legacy])
def test_nothing_is_overwritten_and_nothing_half_done_remains(write, example, tmp_path, monkeypatch):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(PlanError, match="there exists"):
        write(tmp_path / "there", example)
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(LlmcompressError, match=r"there/i.partial cannot be written"):
        write(tmp_path / "there" / "i", example)
    monkeypatch.setattr("os.fsync", lambda handle: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "new", example)
    assert [file.name for file in tmp_path.iterdir()] == ["there"]
