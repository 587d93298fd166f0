"""Processes for commands that a test stops or lets work together; their slow imports are done once."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "llmcompress.cli.commands",
        "llmcompress.engine.execute",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)


def call(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """`python -m llmcompress ARGUMENTS`, and what it said."""
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        process = PROCESSES.Process(target=command, args=(words, said, dict(os.environ), str(Path.cwd())))
        process.start()
        process.join()
        return subprocess.CompletedProcess(words, process.exitcode or 0, *(file.read_text() for file in said))


def command(words: list[str], said: list[Path], environment: dict[str, str], directory: str) -> None:
    """In the process: the command, with stdout and stderr in two files."""
    for descriptor, path in enumerate(said, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = ["llmcompress", *words]
    runpy.run_module("llmcompress", run_name="__main__")
