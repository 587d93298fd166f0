"""A tokenizer of single bytes, so that expected ids can be written down by hand, and a tiny random Llama."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llmcompress.calib import default
from llmcompress.calib.base import TokenRequest
from llmcompress.calib.documents import token_ids

SPECIALS = ["<s>", "</s>", "<pad>"]
VOCAB_SIZE = len(SPECIALS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% if message.tool is defined %}+{{ message.tool }}{% endif %}</s>\n"
    "{% endfor %}"
)


def build(*, opens: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """One token a byte; `opens` puts <s> before every text, as the tokenizers of Llama and Gemma do."""
    alphabet = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if opens:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


@pytest.fixture(autouse=True)
def _texts_are_encoded_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here encoding is what is tested, so that nothing is remembered."""
    monkeypatch.setattr(default, "token_ids", token_ids)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Adds nothing to a text; has a chat template; complains about texts of more than 8 tokens."""
    return build(chat_template=CHAT_TEMPLATE, model_max_length=8)


@pytest.fixture(scope="session")
def opening_tokenizer() -> PreTrainedTokenizerFast:
    return build(opens=True, chat_template="{{ bos_token }}" + CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def bare_tokenizer() -> PreTrainedTokenizerFast:
    """Without special tokens and chat template."""
    return build(bos_token=None, eos_token=None, pad_token=None)


@pytest.fixture(scope="session")
def ask(tokenizer: PreTrainedTokenizerFast) -> Callable[..., TokenRequest]:
    def ask(samples: int, length: int, **other: Any) -> TokenRequest:
        return TokenRequest(
            **{"tokenizer": tokenizer, "seed": 0, "vocab_size": VOCAB_SIZE, **other}, samples=samples, length=length
        )

    return ask


@pytest.fixture(scope="session")
def ids_of(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """Ids of text and special tokens, from the tokenizer's vocabulary and not from its encoder."""
    table = tokenizer.get_vocab()
    shown = {token: tokenizer.decode([token]) for token in table.values()}
    letters = {text: token for token, text in shown.items() if len(text) == 1 and text.isascii()}

    def ids_of(text: str) -> list[int]:
        parts: list[int] = []
        while text:
            special = next((name for name in SPECIALS if text.startswith(name)), None)
            parts.append(SPECIALS.index(special) if special else letters[text[0]])
            text = text[len(special) if special else 1 :]
        return parts

    return ids_of


@pytest.fixture(scope="session")
def tiny_model() -> LlamaForCausalLM:
    """Random, but with logits far from flat, so that likely and unlikely rows differ."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE + 5,  # rows of padding that the tokenizer does not know
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaForCausalLM(config).eval()
        torch.nn.init.normal_(model.lm_head.weight, std=0.4)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    return model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Tensors of a few numbers gain nothing from threads and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def untouched_randomness() -> Any:
    """Fails the test if it moves a global random state."""

    def states() -> tuple[Any, ...]:
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    yield
    assert states() == before
