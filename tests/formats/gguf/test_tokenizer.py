"""The tokenizer of a GGUF file against transformers, the gguf package's reader, and numbers worked out by hand."""

import json
import shutil
from dataclasses import replace

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.pretokenizer import FAMILIES, build, families_like
from llmcompress.formats.gguf.sentencepiece import read_model
from llmcompress.formats.gguf.tokenizer import read_tokenizer, write_tokenizer
from madetokenizers import around, byte_level, cut_by, save, sentencepiece_file, sentencepiece_like, texts

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ROWS = 300
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


@pytest.fixture
def plain(tmp_path):
    """A byte-level tokenizer of 260 tokens with GPT-2's way of cutting."""
    return save(byte_level(), tmp_path)


def small_pieces():
    """Vocabulary and merges of a SentencePiece-like tokenizer: "ab" first, then "abc", then "▁abc"."""
    texts = ["<unk>", "<s>", "</s>", *BYTES, "▁abc", "▁", "c", "b", "a", "abc", "ab"]
    return {text: number for number, text in enumerate(texts)}, [("a", "b"), ("ab", "c"), ("▁", "abc")]


def edited(path, name, change):
    file = path / name
    state = json.loads(file.read_text()) if file.exists() else {}
    change(state)
    file.write_text(json.dumps(state))


def refusal(path, rows=ROWS, **options):
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(path, rows, **options)
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message
    return str(caught.value)


# -- the pre-tokenizer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_known_by_what_it_does(family, tmp_path):
    tokenizer = byte_level(ignore_merges=family.ignore_merges)
    tokenizer.pre_tokenizer = build(family)
    assert read_tokenizer(save(tokenizer, tmp_path), ROWS).pre == family.name


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        (LLAMA3, "smaug-bpe"),
        (LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)"), "smaug-bpe"),
        (LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:'[sdmt]|'re|'ve|'ll)"), "smaug-bpe"),
        (QWEN2, "qwen2"),
        (QWEN2.replace(r"\p{N}|", r"\p{N}{1}|"), "qwen2"),
        (QWEN2.replace(r"\p{N}]?\p{L}+", r"\p{N}]?+\p{L}++"), "qwen2"),
    ],
)
def test_another_spelling_changes_nothing(expression, name, tmp_path):
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = cut_by(expression)
    assert read_tokenizer(save(tokenizer, tmp_path), ROWS).pre == name


@pytest.mark.parametrize(
    "expression",
    [
        LLAMA3.replace("{1,3}", "{1,2}"),
        LLAMA3.replace("{1,3}", "{1,4}"),
        LLAMA3.replace("{1,3}", "{1,9}"),
        LLAMA3.replace("{1,3}", "+"),
        LLAMA3.replace("(?i:", "(?:"),
        LLAMA3.replace("|'d)", ")"),
        LLAMA3.replace(r"]+[\r\n]*", "]+"),
        LLAMA3.replace(r"\s*[\r\n]+|", ""),
        LLAMA3.replace(r"|\s+(?!\S)", ""),
        LLAMA3.replace(" ?[^", "[^"),
        LLAMA3.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+"),
        QWEN2.partition("|[^")[2].join(["[^", ""]),
        r"\p{N}",
        r"\s+",
        "x{100}",
    ],
)
def test_an_unknown_way_of_cutting_is_refused(expression, tmp_path):
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = cut_by(expression)
    save(tokenizer, tmp_path)
    assert "--pre NAME" in refusal(tmp_path)
    assert read_tokenizer(tmp_path, ROWS, pre="jais-2").pre == "jais-2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.steps[-1] != "bytes"], ids=lambda family: family.name
)
def test_no_character_of_an_expression_can_be_left_out_unseen(family):
    samples = texts(120)

    def cuts(pre_tokenizer):
        return [[span for _, span in pre_tokenizer.pre_tokenize_str(text)] for text in samples]

    right, seen = cuts(build(family)), 0
    for at, step in enumerate(family.steps):
        for gap in range(len(step)) if step != "digits" else ():
            try:
                other = build(
                    replace(family, steps=(*family.steps[:at], step[:gap] + step[gap + 1 :], *family.steps[at + 1 :]))
                )
                changed = cuts(other) != right
            except Exception:  # no regular expression any more
                continue
            assert not (changed and family in families_like(other)), step[gap:]
            seen += changed
    assert seen > 10


def test_a_space_put_before_texts_is_refused(tmp_path):
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert "--pre NAME" in refusal(save(tokenizer, tmp_path))


@pytest.mark.parametrize(("name", "flag"), [("gpt-2", True), ("qwen2", True), ("tekken", False)])
def test_whole_words_taken_otherwise_are_refused_by_name(name, flag, tmp_path):
    tokenizer = byte_level(ignore_merges=flag)
    tokenizer.pre_tokenizer = build(next(family for family in FAMILIES if family.name == name))
    save(tokenizer, tmp_path)
    assert f"--pre {name}" in refusal(tmp_path)


def test_normalizers_are_noted_or_refused(tmp_path):
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    assert "NFC" in read_tokenizer(save(tokenizer, tmp_path), ROWS).notes[0]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    assert "Lowercase" in refusal(save(tokenizer, tmp_path))


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_byte_level_tokens_types_and_merges(tmp_path):
    tokenizer = byte_level([("t", "h"), ("th", "e"), ("Ġ", "the")])
    tokenizer.add_special_tokens([AddedToken("<｜end｜>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<|call|>"), AddedToken("  ")])
    read = read_tokenizer(save(tokenizer, tmp_path), ROWS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    real = ["<s>", "</s>", *alphabet, "th", "the", "Ġthe", "<｜end｜>", "<tool>", "<|call|>", "  "]
    assert read.model == "gpt2"
    assert read.tokens == real + [f"[PAD{number}]" for number in range(265, ROWS)]
    assert read.size == len(real) == 265
    assert read.types == [3, 3, *[1] * 259, 3, 4, 3, 4, *[5] * 35]
    assert read.merges == ["t h", "th e", "Ġ the"]
    assert read.scores is None
    assert not read.add_space_prefix


def test_tokens_beyond_the_embedding_are_refused(plain):
    assert read_tokenizer(plain, 260).size == 260
    assert "259 rows" in refusal(plain, 259)


def test_scores_follow_the_order_of_merges(tmp_path):
    vocabulary, merges = small_pieces()
    read = read_tokenizer(save(sentencepiece_like("legacy", vocabulary, merges), tmp_path, unk_token="<unk>"), ROWS)
    score = dict(zip(read.tokens, read.scores, strict=True))
    assert [score[text] for text in ("ab", "abc", "▁abc")] == [0.0, -1.0, -2.0]
    assert [score[text] for text in ("▁", "c", "b", "a")] == [-3.0, -4.0, -5.0, -6.0]
    assert {score[text] for text in ("<unk>", "<s>", "<0x41>", "<tool>")} == {0.0}
    assert read.types == [2, 3, 3, *[6] * 256, *[1] * 7, 3, 4, *[5] * (ROWS - 268)]
    assert (read.model, read.pre, read.merges, read.add_space_prefix) == ("llama", "default", None, True)


def test_merges_that_forbid_ways_to_a_piece_are_noted(tmp_path):
    vocabulary, merges = small_pieces()
    save(sentencepiece_like("gemma", vocabulary, merges), tmp_path, unk_token="<unk>")
    assert read_tokenizer(tmp_path, ROWS).notes == ()
    vocabulary = {**vocabulary, "bc": len(vocabulary)}
    save(sentencepiece_like("gemma", vocabulary, [*merges, ("b", "c")]), tmp_path, unk_token="<unk>")
    assert "orders merges" in read_tokenizer(tmp_path, ROWS).notes[0]  # a + bc makes abc in llama.cpp alone


def test_runs_of_spaces_among_the_added_tokens(tmp_path):
    vocabulary, merges = small_pieces()
    vocabulary |= {"▁▁": len(vocabulary)}
    tokenizer = sentencepiece_like("gemma", vocabulary, [*merges, ("▁", "▁")])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("▁x", normalized=True)])
    read = read_tokenizer(save(tokenizer, tmp_path, unk_token="<unk>"), ROWS)
    assert read.types[read.tokens.index("▁▁")] == 1
    assert read.types[read.tokens.index(" x")] == 4
    assert not read.add_space_prefix


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "said"),
    [
        (normalizers.NFKC(), None, "NFKC"),
        (None, pre_tokenizers.Digits(), "Digits"),
        (None, None, "write spaces as ▁"),
        (normalizers.Replace(" ", "_"), None, "Replace"),
        (None, pre_tokenizers.Metaspace(split=True), "across spaces"),
    ],
)
def test_spaces_that_llama_cpp_treats_otherwise_are_refused(normalizer, pre_tokenizer, said, tmp_path):
    vocabulary, merges = small_pieces()
    vocabulary |= {"c▁": len(vocabulary)}
    tokenizer = sentencepiece_like("gemma", vocabulary, [*merges, ("c", "▁")])
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    assert said in refusal(save(tokenizer, tmp_path, unk_token="<unk>"))


def test_what_is_stripped_beside_a_token_is_noted(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True), AddedToken("<word>", single_word=True)])
    assert "<end> and 1 more" in read_tokenizer(save(tokenizer, tmp_path), ROWS).notes[0]


# -- special tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("said", [True, False, None])
def test_what_transformers_puts_around_texts_counts(template, said, tmp_path):
    save(around(byte_level(), template), tmp_path)
    edited(tmp_path, "tokenizer_config.json", lambda config: config.update(add_bos_token=said))
    read = read_tokenizer(tmp_path, ROWS)
    ids = AutoTokenizer.from_pretrained(tmp_path)("the")["input_ids"]
    assert [0] * read.add_bos + [259] + [1] * read.add_eos == ids
    assert (read.special["bos"], read.special["eos"]) == (0, 1)


@pytest.mark.parametrize("template", ["<s> <s> $A", "$A <s>", "$A </s> </s>"])
def test_what_llama_cpp_cannot_put_around_texts_is_refused(template, tmp_path):
    assert "post_processor" in refusal(save(around(byte_level(), template), tmp_path))


def test_the_token_before_texts_is_bos_whatever_its_name(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<cls>")])
    save(around(tokenizer, "<cls> $A"), tmp_path)
    read = read_tokenizer(tmp_path, ROWS)
    assert (read.special["bos"], read.add_bos) == (260, True)


def test_ids_that_the_tokenizer_does_not_name_come_from_config(tmp_path):
    save(byte_level(), tmp_path, bos_token=None, eos_token=None)
    assert "eos_token" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [7, 8]}))
    assert read_tokenizer(tmp_path, ROWS).special == {"bos": 7, "eos": 7}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": 7, "bos_token_id": 9, "pad_token_id": 50256})
    )
    assert read_tokenizer(tmp_path, ROWS).special == {"bos": 9, "eos": 7}


def test_special_ids_in_the_order_of_their_keys(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        [AddedToken(text) for text in ("<|endoftext|>", "<|im_end|>", "<pad>", "<unk>", "<mask>")]
    )
    save(tokenizer, tmp_path, pad_token="<pad>", unk_token="<unk>", mask_token="<mask>", sep_token="</s>")
    special = read_tokenizer(tmp_path, ROWS).special
    assert list(special.items()) == [
        ("bos", 0), ("eos", 1), ("unk", 263), ("sep", 1), ("pad", 262), ("mask", 264), ("eot", 261),
    ]  # fmt: skip


# -- chat templates -------------------------------------------------------------------------------------------------

MORE = "additional_chat_templates"
NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]


@pytest.mark.parametrize(
    ("in_config", "files", "expected"),
    [
        (None, {}, {}),
        ("C", {}, {"default": "C"}),
        (NAMED, {}, {"default": "D", "rag": "R", "tool_use": "T"}),
        (NAMED[1:], {}, {"rag": "R", "tool_use": "T"}),
        (None, {"chat_template.jinja": "J"}, {"default": "J"}),
        ("C", {"chat_template.jinja": "J"}, {"default": "J"}),
        (None, {"chat_template.jinja": "J", f"{MORE}/b.jinja": "B", f"{MORE}/a.jinja": "é"},
         {"a": "é", "b": "B", "default": "J"}),
        (None, {"chat_template.json": '{"chat_template": "P"}'}, {"default": "P"}),
        ("C", {"chat_template.json": '{"chat_template": "P"}'}, {"default": "C"}),
    ],
)  # fmt: skip
def test_chat_templates_are_those_of_transformers(in_config, files, expected, plain):
    if in_config is not None:
        edited(plain, "tokenizer_config.json", lambda config: config.update(chat_template=in_config))
    for name, text in files.items():
        (plain / name).parent.mkdir(exist_ok=True)
        (plain / name).write_text(text, encoding="utf-8")
    read = read_tokenizer(plain, ROWS)
    assert read.templates == expected
    assert list(read.templates) == sorted(expected)
    if not (in_config is None and "chat_template.json" in files):  # a file of processors
        loaded = AutoTokenizer.from_pretrained(plain).chat_template
        assert expected == ({"default": loaded} if isinstance(loaded, str) else loaded or {})


@pytest.mark.parametrize(
    "wrong", [3, [3], ["x"], [{"name": "x"}], {"a": "b"}, [{"name": 1, "template": "x"}], "\ud800"]
)
def test_chat_templates_of_no_known_form_are_refused(wrong, plain):
    (plain / "chat_template.json").write_text(json.dumps({"chat_template": wrong}))
    assert "chat_template" in refusal(plain)


# -- writing --------------------------------------------------------------------------------------------------------


def written(read, file):
    writer = gguf.GGUFWriter(file, "llama")
    write_tokenizer(writer, read)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return {name: field for name, field in gguf.GGUFReader(file).fields.items() if name.startswith("tokenizer.")}


def test_all_keys_come_back_from_the_file(tiny_model_dir, tmp_path):
    path = shutil.copytree(tiny_model_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("R")
    read = read_tokenizer(path, 1203)
    fields = written(read, tmp_path / "t.gguf")
    kinds = {name: [kind.name for kind in field.types] for name, field in fields.items()}
    assert {name: field.contents() for name, field in fields.items()} == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": read.tokens,
        "tokenizer.ggml.token_type": [3] * 5 + [1] * 1195 + [5] * 3,
        "tokenizer.ggml.merges": read.merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": (path / "chat_template.jinja").read_text(),
        "tokenizer.chat_template.rag": "R",
        "tokenizer.chat_templates": ["rag"],
    }
    assert {kinds[f"tokenizer.ggml.{name}_token_id"][0] for name in ("bos", "eos", "eot", "padding")} == {"UINT32"}
    assert kinds["tokenizer.ggml.token_type"] == ["ARRAY", "INT32"]
    loaded = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert read.tokens[:1200] == loaded.convert_ids_to_tokens(list(range(1200)))


def test_scores_are_written_as_float32(tmp_path):
    save(sentencepiece_like("legacy", *small_pieces()), tmp_path, unk_token="<unk>")
    read = read_tokenizer(tmp_path, ROWS)
    fields = written(read, tmp_path / "t.gguf")
    assert fields["tokenizer.ggml.scores"].contents() == read.scores
    assert [kind.name for kind in fields["tokenizer.ggml.scores"].types] == ["ARRAY", "FLOAT32"]
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is True
    assert "tokenizer.ggml.merges" not in fields


# -- tokenizer.model ------------------------------------------------------------------------------------------------


def model_pieces():
    vocabulary, _ = small_pieces()
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, **dict.fromkeys(BYTES, 6)}
    return [(text, -0.5 * number, kinds.get(text, 1)) for text, number in vocabulary.items()]


def test_tokenizer_model_alone(tmp_path):
    pieces = [*model_pieces(), ("▁▁", -9.0, 4)]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(pieces, prefix=False))
    config = {
        "added_tokens_decoder": {"268": {"content": "<|end|>", "special": True}, "1": {"content": "<s>"}},
        "eos_token": {"content": "<|end|>"}, "add_eos_token": True, "chat_template": "C",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": 267}))
    read = read_tokenizer(tmp_path, 270)
    assert read.tokens == [*(text for text, _, _ in pieces[:-1]), "  ", "<tool>", "<|end|>", "[PAD269]"]
    assert read.types == [2, 4, *(kind for _, _, kind in pieces[2:]), 4, 3, 5]
    assert read.scores[:267] == [score for _, score, _ in pieces]
    assert read.special == {"bos": 1, "eos": 268, "unk": 0, "eot": 268}
    assert (read.add_bos, read.add_eos, read.add_space_prefix, read.size) == (True, True, False, 269)
    assert read.templates == {"default": "C"}


def test_scores_of_tokenizer_model_count_where_the_pieces_are_the_same(tmp_path):
    save(sentencepiece_like("legacy", *small_pieces()), tmp_path, unk_token="<unk>")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(model_pieces()))
    read = read_tokenizer(tmp_path, ROWS)
    assert read.scores[259:266] == [-0.5 * number for number in range(259, 266)]
    assert set(read.scores[:259]) == {0.0}
    other = [(text.replace("abc", "abd"), score, kind) for text, score, kind in model_pieces()]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(other))
    assert read_tokenizer(tmp_path, ROWS).scores[265] == 0.0  # ab, the first merge


@pytest.mark.parametrize("options", [{"model_type": 1}, {"charsmap": b"\1\2"}])
def test_models_that_are_cut_in_another_way_are_refused(options, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(model_pieces(), **options))
    refusal(tmp_path)


def test_a_tokenizer_model_cut_off_within_a_part_is_refused(tmp_path):
    raw = sentencepiece_file(model_pieces()[:3])
    borders, at = set(), 0
    while at < len(raw):
        at += 2 + raw[at + 1]  # a key, a length below 128, and so many bytes
        borders.add(at)
    file = tmp_path / "tokenizer.model"
    for end in set(range(len(raw))) - borders:
        file.write_bytes(raw[:end])
        with pytest.raises(CheckpointError, match="not a SentencePiece model"):
            read_model(file)
    file.write_bytes(raw)
    assert read_model(file).pieces == ["<unk>", "<s>", "</s>"]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_model_or_refused(tmp_path_factory, raw):
    file = tmp_path_factory.getbasetemp() / "any.model"
    file.write_bytes(raw)
    try:
        model = read_model(file)
    except CheckpointError:
        return
    assert len(model.pieces) == len(model.scores) == len(model.types) > 0


# -- damaged and foreign directories --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b'{"model": 3}', b'{"a":' * 50_000, b"[" * 50_000, b"\xff", b"9" * 5000,
        b'{"model": {"type": "BPE", "vocab": {"a": 1' + b"0" * 400 + b'}, "merges": []}}',
    ],
)  # fmt: skip
def test_a_damaged_tokenizer_json_is_refused(raw, plain):
    (plain / "tokenizer.json").write_bytes(raw)
    assert "tokenizer.json" in refusal(plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["model"]["vocab"].update(extra=4_000_000_000),
        lambda state: state["model"]["vocab"].update(extra=2**70),
        lambda state: state["model"]["vocab"].update(extra=-1),
        lambda state: state["model"]["vocab"].update(extra="7"),
        lambda state: state["model"]["vocab"].update(extra=7),
        lambda state: state["model"]["vocab"].update({"a\0b": 270}),
        lambda state: state["model"]["vocab"].pop("th"),
        lambda state: state["model"].pop("vocab"),
        lambda state: state["model"].update(merges=[]),
        lambda state: state["model"].update(merges=[["t", "h", "e"]]),
        lambda state: state["model"].update(merges={"t": "h"}),
        lambda state: state["model"].update(end_of_word_suffix="</w>"),
        lambda state: state["added_tokens"].append({"id": 300}),
        lambda state: state.update(added_tokens=7),
        lambda state: state.update(pre_tokenizer={"type": "Unheard"}),
        lambda state: state.update(pre_tokenizer=None),
        lambda state: state.pop("model"),
    ],
)
def test_wrong_contents_are_refused(change, plain):
    edited(plain, "tokenizer.json", change)
    assert "tokenizer.json" in refusal(plain)


def test_a_panic_of_the_tokenizers_library_is_a_refusal(plain, capfd):
    def change(state):
        state["model"].update(continuing_subword_prefix="x" * 9)

    edited(plain, "tokenizer.json", change)
    assert "tokenizer.json" in refusal(plain)


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="<s>"),
        models.WordPiece({"<s>": 0, "</s>": 1, "a": 2}, unk_token="<s>"),
        models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("a", -1.0)], unk_id=0, byte_fallback=False),
        models.BPE({"<s>": 0, "</s>": 1, "a": 2}, []),
        models.BPE({"<s>": 0, "</s>": 1, "a": 2, "<0x00>": 3}, [], byte_fallback=True),
    ],
)
def test_kinds_that_llama_cpp_cannot_run_are_refused(model, tmp_path):
    refusal(save(Tokenizer(model), tmp_path))


def test_pre_has_no_meaning_for_sentencepiece(tmp_path):
    save(sentencepiece_like("legacy", *small_pieces()), tmp_path, unk_token="<unk>")
    assert "--pre qwen2" in refusal(tmp_path, pre="qwen2")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(model_pieces()))
    assert "--pre qwen2" in refusal(tmp_path, pre="qwen2")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refusal(tmp_path)


def test_vocab_json_and_merges_txt_will_do(tmp_path):
    tokenizer = byte_level()
    tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"})
    )
    read = read_tokenizer(tmp_path, ROWS)
    assert (read.pre, read.size, read.merges) == ("gpt-2", 260, ["t h", "th e"])


def test_a_link_out_of_the_directory_is_refused(plain, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "tokenizer.json"
    shutil.move(plain / "tokenizer.json", outside)
    (plain / "tokenizer.json").symlink_to(outside)
    assert "leaves the model directory" in refusal(plain)
