"""A Modelfile, from which Ollama makes a model of a GGUF file: the chat template in Go's language, and parameters.

The template for Ollama is found by rendering the model's own template with known texts, and cutting out what stands
around those texts.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

from llmcompress.engine.source.text_tokenizer import load_tokenizer
from llmcompress.errors import CheckpointError
from llmcompress.isolation import Limit, isolated
from llmcompress.store.headers import read_json

_SYSTEM, _ASK, _ANSWER, _AGAIN = (
    "Probe of a system text.",
    "Probe of a question.",
    "Probe of an answer.",
    "Probe again.",
)
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}

Message = Mapping[str, str]
Render = Callable[[Sequence[Message], bool], str]


@dataclass(frozen=True)
class Template:
    """What stands before and after each part of a conversation.

    system: None where the template has no system part. default: the system text of a conversation that gives none.
    """

    system: tuple[str, str] | None
    ask: tuple[str, str]
    answer: tuple[str, str]
    default: str = ""

    def go(self) -> str:
        """The template in Go's template language; Ollama repeats it for every turn of a conversation."""
        parts = [f"{self.ask[0]}{{{{ .Prompt }}}}{self.ask[1]}{self.answer[0]}{{{{ .Response }}}}{self.answer[1]}"]
        if self.system is not None:
            parts.insert(0, f"{{{{ if .System }}}}{self.system[0]}{{{{ .System }}}}{self.system[1]}{{{{ end }}}}")
        return "".join(parts)

    @property
    def sayable(self) -> bool:
        """Whether a Modelfile can hold every part literally: no part has a mark that Go or Ollama would interpret."""
        parts = [*(self.system or ()), *self.ask, *self.answer, self.default]
        return not any(mark in part for part in parts for mark in ("{{", "}}", '"""'))

    def render(self, messages: Sequence[Message], prompt: bool) -> str:
        """The text that Ollama makes of a conversation. prompt: whether the beginning of an answer follows."""
        around = {"system": self.system or ("", ""), "user": self.ask, "assistant": self.answer}
        if self.default and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default}, *messages]
        said = [f"{around[m['role']][0]}{m['content']}{around[m['role']][1]}" for m in messages]
        return "".join(said) + (self.answer[0] if prompt else "")


def modelfile_text(model: Path, file: str, add_bos: bool, trust_remote_code: bool = False) -> tuple[str, list[str]]:
    """The text of a Modelfile for the GGUF file called `file`, and notes on what could not be said in it.

    add_bos: whether the runtime puts the token that begins a text before every prompt.
    """

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"the chat template of {model} cannot be put into a Modelfile: {reason}")

    def work(limit: Limit) -> Iterator[bytes]:  # a template is a program of whoever made the checkpoint
        yield json.dumps(_written(tokenizer, model, file, add_bos)).encode()

    tokenizer = load_tokenizer(model, trust_remote_code)
    text, notes = json.loads(b"".join(isolated(work, failed)))
    return text, notes


def _written(tokenizer: Any, model: Path, file: str, add_bos: bool) -> tuple[str, list[str]]:
    generation = read_json(model / "generation_config.json") if (model / "generation_config.json").exists() else {}
    lines, notes = [f"FROM ./{file}"], []
    if tokenizer.chat_template:
        begin = (tokenizer.bos_token or "") if add_bos else ""

        def render(messages: Sequence[Message], prompt: bool) -> str:
            said = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
            return str(said).removeprefix(begin)

        template = find_template(render)
        if template is None:
            notes.append("the chat template cannot be said in Ollama's language: Ollama uses the one in the file")
        else:
            lines.append(f'TEMPLATE """{template.go()}"""')
            lines += [f'SYSTEM """{template.default}"""'] if template.default else []
    lines += [f"PARAMETER stop {json.dumps(word, ensure_ascii=False)}" for word in _stops(tokenizer, generation)]
    for key, name in _PARAMETERS.items():
        value = generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            lines.append(f"PARAMETER {name} {value:g}")
    return "\n".join(lines) + "\n", notes


def find_template(render: Render) -> Template | None:
    """The parts of the template behind `render`; None if the template is not made of such parts.

    render(messages, prompt): the text of a conversation, with `prompt` followed by the beginning of an answer.
    """
    ask, again = {"role": "user", "content": _ASK}, {"role": "user", "content": _AGAIN}
    answer, system = {"role": "assistant", "content": _ANSWER}, {"role": "system", "content": _SYSTEM}
    try:
        alone, turn = render([ask], False), render([ask], True)
        talk = render([ask, answer, again], False)
    except Exception:  # templates raise what they like
        return None
    if not (_ASK in alone and _ANSWER in talk and _AGAIN in talk and turn.startswith(alone)):
        return None
    before, after = alone.split(_ASK, 1)
    between = talk.split(_ANSWER, 1)[1].split(_AGAIN, 1)[0]
    heading = _heading(before, between)
    found = Template(None, (heading, after), (turn.removeprefix(alone), between.removesuffix(heading)))
    try:
        opened = render([system, ask], False)
    except Exception:  # Gemma's refuses a system text
        opened = ""
    if _SYSTEM in opened and _ASK in opened:
        start, rest = opened.split(_SYSTEM, 1)
        close = rest.split(_ASK, 1)[0].removesuffix(heading)
        said = before.removesuffix(heading)
        found = replace(found, system=(start, close), default=said.removeprefix(start).removesuffix(close))
    talks = [([ask], True), ([ask, answer, again], True)] + [([system, ask], True)] * bool(found.system)
    same = all(render(messages, prompt) == found.render(messages, prompt) for messages, prompt in talks)
    return found if same and found.sayable else None


def _heading(one: str, other: str) -> str:
    """The introduction of a question, in which both texts end: it begins at the last tag that names the user's role."""
    shared = commonprefix([one[::-1], other[::-1]])[::-1]  # noqa: RUF071 (letter by letter it shall be)
    tags = [
        found.start()
        for found in re.finditer(r"[<\[]", shared)
        if re.search("user|inst", shared[found.start() :], re.I)
    ]
    return shared[tags[-1] :] if tags else shared


def _stops(tokenizer: Any, generation: Mapping[str, Any]) -> list[str]:
    """The texts of the tokens that end an answer."""
    given = generation.get("eos_token_id")
    numbers = given if isinstance(given, list) else [given]
    words = [tokenizer.convert_ids_to_tokens(n) for n in numbers if isinstance(n, int) and not isinstance(n, bool)]
    return list(dict.fromkeys(word for word in [tokenizer.eos_token, *words] if word))
