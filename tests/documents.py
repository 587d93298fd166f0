"""The commands that the documents show, in their order."""

import shlex
from pathlib import Path

from llmcompress.cli.app import parser
from llmcompress.cli.log import log

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text, *programs):
    """Every command of some programs that begins a line of a script, without what the shell does with it."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.split(maxsplit=1)[:1] and line.split(maxsplit=1)[0] in programs:
            words = shlex.split(line, comments=True)
            shell = [number for number, word in enumerate(words) if word in ("||", "&&", ";") or word.startswith(">")]
            yield words[: shell[0] if shell else None]


def understood(words):
    """The innermost command's context, its options read and checked; as the program itself does it."""
    command, context = parser(), None
    try:
        while True:
            context = command.make_context(words[0] if words else "", list(words), parent=context)
            if not hasattr(command, "commands"):
                context.close()
                return context
            _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    finally:
        log.close()


def code_of(file):
    """The code of a document: lines set in by four spaces, or fenced."""
    fenced, lines = False, []
    for line in file.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line)
    return "\n".join(lines)


def in_document(file, *programs):
    """Commands in the code of a document."""
    return list(commands(code_of(file), *programs))


def ours(text):
    """The words after `llmcompress` of every such command."""
    return [words[1:] for words in commands(text, "llmcompress")]
