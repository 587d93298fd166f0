"""Token ids from llama.cpp are those from transformers."""

import json
from pathlib import Path

import gguf
import pytest
from llamacpp import Llama
from tokenizers import normalizers
from transformers import AutoTokenizer

from llmcompress.formats.gguf.pretokenizer import FAMILIES, build
from llmcompress.formats.gguf.tokenizer import GgufTokenizer, read_tokenizer, write_tokenizer
from madetokenizers import (
    UNUSUAL,
    around,
    byte_level,
    save,
    sentencepiece_file,
    sentencepiece_like,
    sentencepiece_model,
    texts,
    trained,
)

pytestmark = pytest.mark.interop

ROWS = 6000


@pytest.fixture(scope="module")
def model():
    return sentencepiece_model()


def opened(tokenizer: GgufTokenizer, folder: Path) -> Llama:
    """The tokenizer in llama.cpp, from a file without tensors."""
    file = folder / "vocabulary.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    write_tokenizer(writer, tokenizer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return Llama(file, vocab_only=True)


def different(path: Path, samples, **options) -> list[str]:
    """Samples for which llama.cpp and transformers give different ids."""
    loaded = AutoTokenizer.from_pretrained(path)
    with opened(read_tokenizer(path, ROWS, **options), path) as llama:
        return [text for text in samples if llama.ids(text) != loaded(text)["input_ids"]]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_cut_as_in_transformers(family, tmp_path):
    tokenizer = around(trained(family.ignore_merges), "<s> $A")
    tokenizer.pre_tokenizer = build(family)
    save(tokenizer, tmp_path)
    wrong = different(tmp_path, texts())
    assert all(any(part in text for part in UNUSUAL) for text in wrong)
    assert bool(wrong) == (family.note is not None)


def test_another_name_gives_other_ids(tmp_path):
    tokenizer = trained()
    tokenizer.pre_tokenizer = build(FAMILIES[0])
    save(tokenizer, tmp_path)
    assert different(tmp_path, texts()) == []
    assert len(different(tmp_path, texts(), pre="qwen2")) > 50


@pytest.mark.parametrize("name", ["llama-bpe", "smaug-bpe"])
def test_whole_words_are_taken_as_the_tokenizer_takes_them(name, tmp_path):
    # "theta" is a token, and no merges lead to it
    tokenizer = byte_level([("t", "h"), ("e", "t"), ("th", "e"), ("the", "t"), ("thet", "a")])
    family = next(family for family in FAMILIES if family.name == name)
    tokenizer.model.ignore_merges = family.ignore_merges
    tokenizer.pre_tokenizer = build(family)
    save(tokenizer, tmp_path)
    assert different(tmp_path, ["theta", "the", "thet", "theta theta"]) == []
    other = {"llama-bpe": "smaug-bpe", "smaug-bpe": "llama-bpe"}[name]
    assert different(tmp_path, ["theta"], pre=other) == ["theta"]


@pytest.mark.parametrize("kind", ["legacy", "gemma"])
def test_sentencepiece_like_ids_are_equal(kind, model, tmp_path):
    save(around(sentencepiece_like(kind, *model), "<s> $A"), tmp_path, unk_token="<unk>")
    assert read_tokenizer(tmp_path, ROWS).notes == ()
    assert different(tmp_path, texts()) == []


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_what_is_noted_of_metaspace_is_all_that_differs(scheme, model, tmp_path):
    save(around(sentencepiece_like(scheme, *model), "<s> $A"), tmp_path, unk_token="<unk>")
    notes = read_tokenizer(tmp_path, ROWS).notes
    assert len(notes) == {"first": 2, "always": 1}[scheme]
    wrong = different(tmp_path, texts())
    assert wrong
    assert all(text.startswith(" ") or "<" in text for text in wrong)


def test_constant_scores_would_give_other_ids(model, tmp_path):
    save(sentencepiece_like("legacy", *model), tmp_path, unk_token="<unk>")
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = read_tokenizer(tmp_path, ROWS)
    constant = GgufTokenizer(**{**vars(tokenizer), "scores": [-1000.0] * ROWS})
    with opened(constant, tmp_path) as llama:
        assert sum(llama.ids(text) != loaded(text)["input_ids"] for text in texts()) > 10


@pytest.mark.parametrize("prefix", [True, False])
def test_tokenizer_model_alone_gives_the_ids_of_its_merges(prefix, model, tmp_path):
    vocabulary, merges = model
    rank = {piece: at for at, piece in enumerate(dict.fromkeys(a + b for a, b in merges))}
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|eot|>": 3}
    pieces = [
        (text, -float(rank.get(text, len(rank))), kinds.get(text, 6 if text.startswith("<0x") else 1))
        for text in vocabulary
    ]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(pieces, prefix=prefix))
    added = {str(len(pieces)): {"content": "<tool>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    oracle = around(sentencepiece_like("legacy" if prefix else "gemma", vocabulary, merges), "<s> $A")
    with opened(read_tokenizer(tmp_path, ROWS), tmp_path) as llama:
        wrong = [text for text in texts() if llama.ids(text) != oracle.encode(text).ids]
    assert [text for text in wrong if "</s>" not in text] == []  # the oracle takes </s> for text
    assert len(wrong) < len(texts()) / 4


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer"])
def test_classes_that_build_their_own_pre_tokenizer(name, tmp_path):
    save(trained(), tmp_path, tokenizer_class=name)  # the file says: no cuts at all
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": name}))
    composed = [text for text in texts() if normalizers.NFC().normalize_str(text) == text]
    assert type(AutoTokenizer.from_pretrained(tmp_path)).__name__ == name
    assert different(tmp_path, composed) == []


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer"])
def test_sentencepiece_classes_that_build_their_own(name, model, tmp_path):
    save(sentencepiece_like("legacy", *model), tmp_path, unk_token="<unk>")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "mask_token": "<|eot|>"}))
    assert type(AutoTokenizer.from_pretrained(tmp_path)).__name__ == name
    plain = [text for text in texts() if not text.startswith(" ") and "<" not in text]
    assert len(plain) > 80
    assert different(tmp_path, plain) == []


def test_the_tiny_model_in_llama_cpp(tiny_model_dir, tmp_path):
    loaded = AutoTokenizer.from_pretrained(tiny_model_dir)
    with opened(read_tokenizer(tiny_model_dir, 1200), tmp_path) as llama:
        lib, vocabulary = llama.lib, llama.vocab
        assert lib.llama_vocab_n_tokens(vocabulary) == 1200
        assert [getattr(lib, f"llama_vocab_{name}")(vocabulary) for name in ("bos", "eos", "eot", "pad")] == [
            1,
            2,
            4,
            0,
        ]
        assert lib.llama_vocab_get_add_bos(vocabulary)
        assert not lib.llama_vocab_get_add_eos(vocabulary)
        assert [token for token in range(1200) if lib.llama_vocab_is_eog(vocabulary, token)] == [2, 4]
        for text in texts():
            ids = llama.ids(text)
            assert ids == loaded(text)["input_ids"]
            assert llama.text(ids) == "<s>" + text


@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_what_is_put_around_a_text(template, tmp_path):
    save(around(trained(), template), tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        (tmp_path / "tokenizer.json").read_text().replace('"use_regex": false', '"use_regex": true')
    )
    assert different(tmp_path, ["", *texts(60)]) == []


def test_holes_and_empty_rows_are_filled(tmp_path):
    save(byte_level(), tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    vocabulary = {text: at + 3 * (at > 100) for text, at in state["model"]["vocab"].items()}
    state["model"]["vocab"] = vocabulary | {"<|im_end|>": 300}
    state["added_tokens"].append({**state["added_tokens"][0], "id": 300, "content": "<|im_end|>"})
    file.write_text(json.dumps(state))
    assert different(tmp_path, ["the end<|im_end|>"]) == []
    with opened(read_tokenizer(tmp_path, 310), tmp_path) as llama:
        shown = [llama.lib.llama_vocab_get_text(llama.vocab, number) for number in (101, 103, 309)]
        assert shown == [b"[PAD101]", b"[PAD103]", b"[PAD309]"]
        assert llama.lib.llama_vocab_eot(llama.vocab) == 300
