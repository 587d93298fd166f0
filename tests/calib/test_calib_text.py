"""Text files and folders, and the texts that come with the project."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llmcompress.calib.default as default_source
import llmcompress.calib.text as text_source
from llmcompress.calib.default import Default
from llmcompress.calib.text import Text, text_files
from llmcompress.errors import CalibrationError


def all_tokens(source, ask, count):
    """The whole stream: one window of `count` tokens, and no room for one more."""
    with pytest.raises(CalibrationError, match=f"gives {count} tokens"):
        source.tokens(ask(1, count + 1))
    return source.tokens(ask(1, count))[0].tolist()


def test_a_file_is_one_document(tmp_path, ask, ids_of):
    (tmp_path / "a.txt").write_text("two\nlines")
    assert all_tokens(Text(path=tmp_path / "a.txt"), ask, 10) == ids_of("two\nlines</s>")


def test_a_folder_gives_its_texts_ordered_by_path(tmp_path, ask, ids_of):
    for name in ("b/2.txt", "b/10.md", "a.txt", "B.TXT", "b.txt", "c/d/e.txt", "notes.py", ".git/x.txt", ".y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    expected = ids_of("<B.TXT></s><a.txt></s><b/10.md></s><b/2.txt></s><b.txt></s><c/d/e.txt></s>")
    assert all_tokens(Text(path=tmp_path), ask, len(expected)) == expected


def test_byte_order_mark_and_line_ends_do_not_change_the_tokens(tmp_path, ask):
    (tmp_path / "plain.txt").write_bytes(b"one\ntwo\n")
    (tmp_path / "other.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    plain, other = (all_tokens(Text(path=tmp_path / name), ask, 9) for name in ("plain.txt", "other.txt"))
    assert plain == other


@settings(deadline=None, max_examples=20)  # a process is forked for every text
@given(st.text(min_size=1).filter(str.strip))
def test_the_tokens_decode_to_the_text(tmp_path_factory, ask, tokenizer, text):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    clean = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not clean.strip():
        return
    length = len(tokenizer(clean)["input_ids"]) + 1
    assert tokenizer.decode(Text(path=path).tokens(ask(1, length))[0]) == clean + "</s>"


def test_a_long_text_is_neither_cut_nor_complained_about(tmp_path, ask, ids_of, make_tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text("x" * 100)
    short, said = make_tokenizer(model_max_length=8), []
    monkeypatch.setattr(logging.getLogger("transformers.tokenization_utils_base"), "warning", lambda *m: said.append(m))
    tokens = Text(path=tmp_path / "a.txt").tokens(ask(1, 101, tokenizer=short))
    assert tokens.tolist() == [ids_of("x" * 100 + "</s>")]
    assert said == []
    short("x" * 100)
    assert len(said) == 1  # what a plain call says


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_apply(tmp_path, ask, ids_of, make_tokenizer):
    cutting = make_tokenizer()
    cutting.backend_tokenizer.enable_truncation(4)
    cutting.backend_tokenizer.enable_padding(length=40)
    (tmp_path / "a.txt").write_text("ten tokens")
    tokens = Text(path=tmp_path / "a.txt").tokens(ask(1, 11, tokenizer=cutting))
    assert tokens.tolist() == [ids_of("ten tokens</s>")]


def test_the_tokenizer_adds_its_own_special_tokens_and_opens_windows(tmp_path, ask, ids_of, opening_tokenizer):
    (tmp_path / "a.txt").write_text("abcdef")
    tokens = Text(path=tmp_path / "a.txt").tokens(ask(2, 4, tokenizer=opening_tokenizer))
    assert tokens.tolist() == [ids_of("<s>abc"), ids_of("<s>def")]


@pytest.mark.parametrize("data", [b"good \xff bad", b"\xef\xbb\xbfgo\xff", b"12345\xc3"])
def test_invalid_utf8_names_file_and_byte(tmp_path, ask, data):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(data)
    with pytest.raises(CalibrationError, match=r"b\.txt is not valid UTF-8 at byte 5"):
        Text(path=tmp_path).tokens(ask(1, 2))


@pytest.mark.parametrize("data", ["", " \n\t", "\ufeff"])
def test_an_empty_text_is_refused_by_name(tmp_path, ask, data):
    (tmp_path / "a.txt").write_text("long enough to fill the windows")
    (tmp_path / "b.txt").write_text(data)
    with pytest.raises(CalibrationError, match=r"b\.txt holds no text"):
        Text(path=tmp_path).tokens(ask(1, 2))


def test_missing_files_and_folders_without_text_are_refused(tmp_path, ask):
    with pytest.raises(CalibrationError, match=r"cannot read .*none\.txt: No such file"):
        Text(path=tmp_path / "none.txt").tokens(ask(1, 2))
    with pytest.raises(CalibrationError, match=r"no \.txt or \.md file in"):
        Text(path=tmp_path).tokens(ask(1, 2))


def test_a_folder_of_very_many_files_is_refused_instead_of_walked(tmp_path, ask, monkeypatch):
    monkeypatch.setattr(text_source, "_MOST_FILES", 3)
    for name in ("a.txt", "b.txt", "c/d.txt", ".git/x", ".git/y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    with pytest.raises(CalibrationError, match="holds more than 3 files and folders"):
        Text(path=tmp_path).tokens(ask(1, 2))
    (tmp_path / "b.txt").unlink()
    assert text_files(tmp_path) == [tmp_path / "a.txt", tmp_path / "c" / "d.txt"]


def test_texts_are_deterministic_and_leave_random_states_alone(tmp_path, ask, untouched_randomness):
    (tmp_path / "a.txt").write_text("some text that fills a number of windows, and then some more")
    first, again, other = (Text(path=tmp_path).tokens(ask(5, 4, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_default_texts_are_those_of_the_package_else_of_the_checkout(tmp_path, ask, ids_of, monkeypatch):
    package = tmp_path / "src" / "llmcompress"
    monkeypatch.setattr(default_source, "PACKAGE", package)
    with pytest.raises(CalibrationError, match="this installation lacks its calib_data"):
        Default().tokens(ask(1, 2))
    for place, text in ((tmp_path, "checkout"), (package, "installed")):
        (place / "calib_data" / "prose").mkdir(parents=True)
        (place / "calib_data" / "README.md").write_text("not a text")
        (place / "calib_data" / "prose" / "a.txt").write_text(text)
        assert all_tokens(Default(), ask, len(text) + 1) == ids_of(text + "</s>")


def test_the_texts_of_this_project_are_found_and_readable(ask):
    files = text_files(default_source.shipped("calib_data"), suffixes=(".txt",))
    size = sum(len(file.read_bytes()) + 1 for file in files)
    tokens = Default().tokens(ask(1, size // 2))
    assert tokens.shape == (1, size // 2)
