"""What models read of the items of tasks, as token ids: the text as it stands, or through a chat template."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llmcompress.calib.documents import Document, prompts, token_ids
from llmcompress.engine.source.text_tokenizer import load_tokenizer
from llmcompress.errors import CalibrationError, CheckpointError
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.validate.omission import Eviction
from llmcompress.validate.request import Request
from llmcompress.validate.task_items import Item

_ORIGIN = "the items of --tasks"


class Asked(NamedTuple):
    """Token ids that a model reads but for the last, of which those from `start` on are the continuation."""

    ids: tuple[int, ...]
    start: int


def tokenizer_of(request: Request, chat: bool = False) -> Any:
    """The tokenizer that both models read with. CheckpointError where a chat template is wanted, and it has none."""
    place = request.ref or request.model
    tokenizer = load_tokenizer(place, request.trust_remote_code)
    if chat and not getattr(tokenizer, "chat_template", None):
        raise CheckpointError(
            f"{place} has no chat template, which --chat takes", "leave --chat out, or put chat_template.jinja there"
        )
    return tokenizer


def asked_of(request: Request, items: Sequence[Item], chat: bool) -> tuple[list[list[Asked]], dict[int, list[int]]]:
    """What models read for each pair of each item, and the prompts after which they write, by the item's number.

    Spaces at the end of a prompt belong to what follows it, but for one after which models write.
    """
    tokenizer = tokenizer_of(request, chat)
    pairs = _chats(tokenizer, items) if chat else [_plain(item) for item in items]
    known: dict[str, str] = {}
    for item, of_item in zip(items, pairs, strict=True):
        for prompt, choice in of_item:
            known.setdefault(prompt.rstrip(), item.where)
            known.setdefault(prompt + choice, item.where)
            if item.written is not None:
                known.setdefault(prompt, item.where)
    tokens = dict(zip(known, token_ids(tokenizer, _texts(tokenizer, known), _ORIGIN), strict=True))
    found = [
        [Asked(tuple(tokens[prompt + choice]), len(tokens[prompt.rstrip()])) for prompt, choice in of_item]
        for of_item in pairs
    ]
    for item, asked in zip(items, found, strict=True):
        if any(not 0 < one.start < len(one.ids) for one in asked):
            raise CalibrationError(f"{item.where}: what follows its prompt adds no token", "change or remove the item")
    written = {n: tokens[pairs[n][0][0]].tolist() for n, item in enumerate(items) if item.written is not None}
    return found, written


def _plain(item: Item) -> list[tuple[str, str]]:
    """The pairs of an item, with all that is read."""
    return [(item.about + item.shots + prompt, choice) for prompt, choice in item.pairs]


def _chats(tokenizer: Any, items: Sequence[Item]) -> list[list[tuple[str, str]]]:
    """The pairs of items, with prompts as the user's turn in a chat, and choices as what the assistant begins with.

    No space stands before a choice: none does after the beginning of a turn.
    """
    asked: dict[tuple[str, str], str] = {}
    for item in items:
        if item.fixed:
            raise CalibrationError(
                f"{item.where} is what another program had models read, and takes no chat template",
                "leave --chat out, or give the items themselves",
            )
        for prompt, _ in item.pairs:
            asked.setdefault((item.about, item.shots + prompt), item.where)
    rows = (Document(where, {"messages": _messages(*key)}) for key, where in asked.items())
    texts = dict(zip(asked, prompts(tokenizer, rows, _ORIGIN), strict=True))
    return [
        [(texts[item.about, item.shots + prompt], choice.removeprefix(" ")) for prompt, choice in item.pairs]
        for item in items
    ]


def _messages(about: str, prompt: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": about}] if about else []
    return [*system, {"role": "user", "content": prompt}]


def _texts(tokenizer: Any, texts: Mapping[str, str]) -> Iterator[Document]:
    """Texts with their places. One that begins with the token that opens texts, as templates write it, gets no more."""
    opening = getattr(tokenizer, "bos_token", None)
    for text, where in texts.items():
        yield Document(where, text, special_tokens=not (opening and text.startswith(opening)))


def room_of(model: StreamedModel) -> int | None:
    """The most tokens that a model reads at once; None where its config sets no limit."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return room if isinstance(room, int) else None


def refuse_longer(
    model: StreamedModel, asked: Sequence[Sequence[Asked]], prompts: Mapping[int, Sequence[int]], items: Sequence[Item]
) -> None:
    """CalibrationError for an item that does not fit into the model's context, or leaves no room there to write."""
    room = room_of(model)
    if room is None:
        return
    for number, (item, of_item) in enumerate(zip(items, asked, strict=True)):
        longest = max(len(one.ids) for one in of_item)
        if longest > room:
            raise CalibrationError(f"{item.where} has {longest} tokens, the model reads {room}", "shorten the item")
        if item.written is not None and len(prompts[number]) + item.written.most > room:
            raise CalibrationError(
                f"{item.where} has {len(prompts[number])} tokens and up to {item.written.most} to write, "
                f"the model reads {room}",
                "shorten the item, or its 'most'",
            )


def refuse_shorter(
    eviction: Eviction, asked: Sequence[Sequence[Asked]], prompts: Mapping[int, Sequence[int]], items: Sequence[Item]
) -> None:
    """CalibrationError for an item whose context has too little to evict from: its prompt but for the last token."""
    for number, (item, of_item) in enumerate(zip(items, asked, strict=True)):
        context = min(one.start for one in of_item) - 1
        if number in prompts:
            context = min(context, len(prompts[number]) - 1)
        if not eviction.fits(context):
            raise CalibrationError(
                f"{item.where} has {context} tokens that {eviction} could evict from, and {eviction.score.name} always "
                f"keeps {eviction.score.always}",
                "make prompts longer with --shots, or use a lower ratio",
            )
