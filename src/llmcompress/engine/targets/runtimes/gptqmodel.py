"""What GPTQModel accepts."""

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.grid_facts import BitWidths, Groups
from llmcompress.engine.targets.model_facts import Unread
from llmcompress.engine.targets.runtimes.common import AWQ_BITS

_RENAMED = (  # it goes by the names that transformers gives to modules
    Unread(
        lambda entry: entry.module.endswith(".gate_up_proj"),
        why="it splits a joined gate_up_proj and finds no codes for the parts",
    ),
    Unread(
        lambda entry: ".block_sparse_moe.experts." in entry.module,
        why="it renames experts of a block_sparse_moe and finds no codes for them",
    ),
)
AWQ_GROUPS = Groups((32, 64, 128), why="GPTQModel's kernels for awq take groups of 32, 64 or 128, or one scale per row")
TARGET = Target(
    "gptqmodel",
    "GPTQModel",
    "7.7, read; 7.6 run",
    place=1,
    formats={
        "gptq": (
            BitWidths((2, 3, 4, 8), why="it takes 2, 3, 4 and 8 bits"),
            Groups(
                (16, 32, 64, 128, 256, 512, 1024),
                why="its kernels take groups of the powers of two from 16 to 1024, or one scale per row",
            ),
            *_RENAMED,
            Unread(
                lambda entry: entry.module == "embed_out",
                quantised=False,
                why="it does not find a head called embed_out and leaves it at random values, without an error",
            ),
        ),
        "awq": (AWQ_BITS, AWQ_GROUPS, *_RENAMED),
        "dense": (),
    },
    further=False,
)
