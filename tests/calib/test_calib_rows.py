"""Rows of jsonl files and of tables: text, messages through the chat template, and every way to be refused."""

import json
import socket
from datetime import datetime

import datasets
import pytest
import torch
from datasets.utils import are_progress_bars_disabled

from llmcompress.calib.dataset import Dataset
from llmcompress.calib.jsonl import Jsonl
from llmcompress.errors import CalibrationError

HELLO = [{"role": "user", "content": "hello"}, {"role": "bot", "content": "yes"}]
HELLO_RENDERED = "[user]hello</s>\n[bot]yes</s>\n"


@pytest.fixture(params=["jsonl", "parquet", "saved"])
def source(request, tmp_path):
    """Writes rows in one of the three ways and gives the source that reads them."""

    def write(rows, **options):
        if request.param == "jsonl":
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            return Jsonl(path=path, **options)
        table = datasets.Dataset.from_list(rows)
        if request.param == "parquet":
            path = tmp_path / "rows [1] *.parquet"  # datasets takes paths for patterns
            table.to_parquet(path)
        else:
            path = tmp_path / "rows"
            table.save_to_disk(path)
        return Dataset(path=path, **options)

    return write


def all_tokens(source, ask, count, **other):
    with pytest.raises(CalibrationError, match=f"gives {count} tokens"):
        source.tokens(ask(1, count + 1, **other))
    return source.tokens(ask(1, count, **other))[0].tolist()


def test_rows_are_documents_in_order(source, ask, ids_of, untouched_randomness):
    expected = ids_of("first</s>second</s>third</s>")
    rows = [{"text": "first", "n": 1}, {"text": "second", "n": 2}, {"text": "", "n": 3}, {"text": "third", "n": 4}]
    assert all_tokens(source(rows), ask, len(expected)) == expected


def test_another_field_holds_the_text(source, ask, ids_of):
    rows = [{"body": "one", "text": "no"}, {"body": "two", "text": "no"}]
    assert all_tokens(source(rows, field="body"), ask, 8) == ids_of("one</s>two</s>")


@pytest.mark.parametrize("field", ["messages", "conversation"])
def test_messages_go_through_the_chat_template(source, ask, ids_of, field):
    options = {} if field == "messages" else {"field": field}
    expected = ids_of(HELLO_RENDERED + HELLO_RENDERED.replace("yes", "no"))
    rows = [{field: HELLO}, {field: [HELLO[0], {"role": "bot", "content": "no"}]}]
    assert all_tokens(source(rows, **options), ask, len(expected)) == expected


def in_parts(text):
    return [{"type": "text", "text": text[:1]}, {"type": "text", "text": text[1:]}]


def test_parts_of_text_are_one_text(source, ask, ids_of):
    rows = [{"messages": [{**message, "content": in_parts(message["content"])} for message in HELLO]}]
    expected = ids_of(HELLO_RENDERED)
    assert all_tokens(source(rows), ask, len(expected)) == expected


def test_rows_of_text_and_of_messages_mix(source, ask, ids_of):
    rows = [{"text": "plain", "messages": None}, {"text": None, "messages": HELLO}]
    expected = ids_of("plain</s>" + HELLO_RENDERED)
    assert all_tokens(source(rows), ask, len(expected)) == expected


def test_a_template_that_writes_the_opening_token_does_not_get_it_twice(source, ask, ids_of, opening_tokenizer):
    expected = ids_of("<s>" + HELLO_RENDERED)
    assert all_tokens(source([{"messages": HELLO}]), ask, len(expected), tokenizer=opening_tokenizer) == expected


def test_keys_that_a_table_fills_with_none_stay_undefined(source, ask, ids_of):
    rows = [{"messages": [{"role": "u", "content": "a", "tool": "t"}, {"role": "u", "content": "b", "tool": None}]}]
    expected = ids_of("[u]a+t</s>\n[u]b</s>\n")
    assert all_tokens(source(rows), ask, len(expected)) == expected


def test_templates_see_no_keys_of_none_under_any_transformers(source, ask, make_tokenizer, monkeypatch):
    spied = make_tokenizer(chat_template="x")
    monkeypatch.setattr(spied, "apply_chat_template", lambda given, **_: repr(given))
    message = {"role": "u", "content": "a"}
    expected = spied(repr([message, {"role": "u", "tool": "t"}]))["input_ids"]
    asked = ask(1, len(expected), tokenizer=spied)
    found = source([{"messages": [message, {"role": "u", "content": None, "tool": "t"}]}]).tokens(asked)
    assert found.tolist() == [expected]


def test_templates_that_write_the_date_give_the_same_ids_every_day(source, ask, ids_of, make_tokenizer):
    dated = make_tokenizer(chat_template="\n{{ strftime_now('%d %b %Y, %H:%M') }} {{ messages[0].content }}")
    today = dated.apply_chat_template(HELLO, tokenize=False)
    assert today.startswith(f"\n{datetime.now():%d %b %Y}")  # what the plain template would do
    expected = ids_of("\n01 Jan 2025, 00:00 hello</s>")
    assert all_tokens(source([{"messages": HELLO}]), ask, len(expected), tokenizer=dated) == expected


def test_rows_are_deterministic(source, ask, untouched_randomness):
    rows = source([{"text": f"row number {n}"} for n in range(20)])
    first, again, other = (rows.tokens(ask(5, 4, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_too_few_rows_are_refused_with_the_count(source, ask):
    with pytest.raises(CalibrationError, match=r"gives 12 tokens, which fill 2 windows of 5; 3 were asked for"):
        source([{"text": "hello"}, {"text": "world"}]).tokens(ask(3, 5))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": []}, "messages of .* is an empty list"),
        ({"messages": [{"content": "x"}]}, "holds a message without a role"),
        ({"messages": ["hello"]}, "holds a message without a role"),
        ({"messages": [{"role": "forbidden", "content": "x"}]}, "the chat template refuses .*: no such role"),
        ({"messages": 7}, "'messages' of .* is int, neither text nor a list of messages"),
        ({"text": 7}, "'text' of .* is int, neither text nor a list of messages"),
    ],
)
def test_bad_rows_are_refused(source, ask, row, said):
    with pytest.raises(CalibrationError, match=said):
        source([row]).tokens(ask(1, 2))


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[9].role }}", "{% for", "{{ range(10**9) }}", "{{ x() }}"]
)
def test_a_template_may_fail_in_any_way(source, ask, make_tokenizer, template):
    with pytest.raises(CalibrationError, match="the chat template refuses"):
        source([{"messages": HELLO}]).tokens(ask(1, 2, tokenizer=make_tokenizer(chat_template=template)))


def test_messages_need_a_chat_template(source, ask, bare_tokenizer):
    with pytest.raises(CalibrationError, match="needs a chat template, and the model's tokenizer has none"):
        source([{"messages": HELLO}]).tokens(ask(1, 2, tokenizer=bare_tokenizer))


def test_a_row_with_neither_is_refused_by_its_number(source, ask):
    bad = source([{"text": "fine", "other": 1}, {"text": None, "other": 1}])
    with pytest.raises(CalibrationError, match=r"(line 2|row 1) has neither 'text' nor 'messages'"):
        bad.tokens(ask(1, 2))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "x"', "line 3 is not JSON: expecting ',' delimiter"),
        (b"hello", "line 3 is not JSON: expecting value"),
        (b"[" * 100_000, "line 3 is not JSON: a number or nesting beyond limits"),
        (b'["text"]', "line 3 is not a JSON object"),
        (b'{"prompt": "x"}', "line 3 has neither 'text' nor 'messages'; it has prompt"),
        (b'{"text": "\xff"}', "is not valid UTF-8 at byte 29"),
        (b'{"text": "a\\ud800b"}', "line 3 holds half a surrogate pair at character 1"),
    ],
)
def test_bad_lines_are_refused_by_file_and_number(tmp_path, ask, line, said):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(CalibrationError) as refusal:
        Jsonl(path=tmp_path / "a.jsonl").tokens(ask(1, 2))
    assert refusal.value.message.startswith(str(tmp_path / "a.jsonl"))
    assert said in refusal.value.message.lower().replace("json", "JSON").replace("utf", "UTF")


def test_byte_order_mark_and_line_ends_of_jsonl_are_read(tmp_path, ask, ids_of):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}')
    assert all_tokens(Jsonl(path=tmp_path / "a.jsonl"), ask, 8) == ids_of("one</s>two</s>")


def test_a_missing_jsonl_file_is_refused(tmp_path, ask):
    with pytest.raises(CalibrationError, match=r"cannot read .*: No such file"):
        Jsonl(path=tmp_path / "a.jsonl").tokens(ask(1, 2))


@pytest.fixture
def splits(tmp_path):
    tables = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict(train=tables["train"]).save_to_disk(tmp_path / "single")
    return tmp_path


def test_a_split_is_named_where_there_are_several(splits, ask, ids_of):
    assert all_tokens(Dataset(path=splits / "splits", split="test"), ask, 5) == ids_of("test</s>")
    assert all_tokens(Dataset(path=splits / "single"), ask, 6) == ids_of("train</s>")
    with pytest.raises(CalibrationError, match="has several splits") as refusal:
        Dataset(path=splits / "splits").tokens(ask(1, 2))
    assert refusal.value.hint == "name one with split: train, test"
    for folder in ("splits", "single"):
        with pytest.raises(CalibrationError, match="has no split 'dev'"):
            Dataset(path=splits / folder, split="dev").tokens(ask(1, 2))


def test_a_table_without_the_columns_is_refused_by_the_names_it_has(tmp_path, ask):
    datasets.Dataset.from_dict({"prompt": ["x"], "answer": ["y"]}).save_to_disk(tmp_path / "t")
    with pytest.raises(CalibrationError, match="has no column 'text' or 'messages'; it has prompt, answer"):
        Dataset(path=tmp_path / "t").tokens(ask(1, 2))


@pytest.mark.parametrize("name", ["bad.parquet", "none.parquet", "empty", "none"])
def test_what_datasets_cannot_read_is_refused(tmp_path, ask, name):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing more")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "state.json").write_text("{}")
    (tmp_path / "empty" / "dataset_info.json").write_text("{}")
    with pytest.raises(CalibrationError, match=f"datasets cannot read .*{name}"):
        Dataset(path=tmp_path / name).tokens(ask(1, 2))


def test_tables_are_read_offline_quietly_and_without_leaving_files(tmp_path, ask, monkeypatch, capfd):
    datasets.Dataset.from_dict({"text": ["hello"]}).to_parquet(tmp_path / "a.parquet")
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", kept)
    monkeypatch.setenv("TMPDIR", str(kept))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
    datasets.enable_progress_bars()
    datasets.logging.set_verbosity_warning()
    capfd.readouterr()
    assert Dataset(path=tmp_path / "a.parquet").tokens(ask(1, 6)).shape == (1, 6)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(CalibrationError):
        Dataset(path=tmp_path / "bad.parquet").tokens(ask(1, 6))
    assert capfd.readouterr() == ("", "")
    assert list(kept.iterdir()) == []
    assert not are_progress_bars_disabled()
    assert datasets.logging.get_verbosity() == datasets.logging.WARNING
