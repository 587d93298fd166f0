"""What to do instead of what users of other tools type, and of values that look right and are not."""

import re

COMMANDS = {
    "help": "write `llmcompress --help`, or `llmcompress gptq --help` for a command",
    "quantize": "name the method: `llmcompress gptq MODEL`, `rtn`, `awq`, ..., or `llmcompress gguf MODEL`",
    "convert": "`llmcompress gguf MODEL --type F16` writes GGUF; `export` writes a finished run in other formats",
    "quantise": "name the method: `llmcompress gptq MODEL`, `rtn`, `awq`, ..., or `llmcompress gguf MODEL`",
    "prune": "name the method: `llmcompress wanda MODEL --sparsity 0.5`, `sparsegpt`, `magnitude`",
    "benchmark": "`llmcompress eval OUT --ref MODEL` measures fidelity, with --backend also speed",
}
OPTIONS = {
    "--skip": "write `--set 'PATTERN: {skip: true}'` for matrices that stay as they are",
    "--ignore": "write `--set 'PATTERN: {skip: true}'` for matrices that stay as they are",
    "--keep-head": "the head stays as it is unless --head-bits is given: leave it out",
    "--dataset": "write `--calibration PATH`",
    "--out": "write `--output PATH`, or `-o PATH`",
}
VALUES = {
    "--bits": "bits of one matrix are whole; for an average use --bpw of gptq, rtn or gguf",
}
"""By option: what may have been meant by a value that is refused."""


def instead(message: str) -> str | None:
    """The hint for a command line that is refused with `message`; None where `--help` says more."""
    named = re.search(r"'?(--[a-z-]+)'?", message)
    option = named[1] if named else ""
    if unknown := re.match(r"No such command '([^']*)'", message):
        return COMMANDS.get(unknown[1])
    if message.startswith("No such option"):
        return OPTIONS.get(option)
    return VALUES.get(option) if message.startswith("Invalid value") else None
