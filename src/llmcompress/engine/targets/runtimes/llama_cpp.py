"""What llama.cpp's converter accepts."""

from dataclasses import replace

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.grid_facts import BitWidths, Groups
from llmcompress.engine.targets.input_facts import ScalesByToken
from llmcompress.engine.targets.model_facts import LackedTypes, LostTypes, Unread
from llmcompress.engine.targets.runtimes.common import FROM_ORIGINAL, SOME_TYPES, matrices
from llmcompress.engine.targets.scheme_facts import OneScheme
from llmcompress.engine.targets.shape_facts import Multiples
from llmcompress.formats.gguf.refused import NOT_RUN
from llmcompress.formats.kv_cache import OPTION

_LOST = (
    LostTypes(
        ("dbrx", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "llama4_text"),
        experts=True,
        why="it looks for experts in one tensor, and they are written one by one",
    ),
    LostTypes(("gemma3n_text",), why="it finds no scales of some codes"),
)
_FOURS = "it reads nvfp4 in four blocks at once, so that it takes multiples of 64 inputs"
TARGET = Target(
    "llama.cpp",
    "llama.cpp's converter",
    "build 11434",
    place=5,
    formats={
        "compressed-tensors": (
            *_LOST,
            BitWidths((2, 4, 8), why="it reads 2, 4 and 8 bits"),
            OneScheme(order=True, why="it takes one config group"),
            Unread(matrices("mxfp4"), why="it knows no mxfp4-pack-quantized"),
            Unread(matrices("mxfp8"), why="it knows no mxfp8-quantized"),
            Unread(matrices("fp8-tensor"), why="it reads fp8 by row or block, not with one scale for a matrix"),
            Unread(
                lambda entry: matrices("nvfp4")(entry) and ".block_sparse_moe." in entry.module,
                why="it knows no names for experts of Mixtral in nvfp4",
            ),
            Multiples(1, 64, types=("nvfp4",), why=_FOURS),
            Multiples(1, 64, experts=True, types=("nvfp4",), why=_FOURS),
            Groups(None, rows=False, why="it needs groups"),
            ScalesByToken(why="it has no place for a scale of inputs"),
            Unread(
                lambda entry: OPTION in entry.options,
                quantised=False,
                by_hand="leave --kv-cache out",
                why="it refuses tensors it has no name for, such as scales of keys and values",
            ),
        ),
        "gptq": (
            *_LOST,
            BitWidths((2, 4, 8), why="it reads 2, 4 and 8 bits"),
            OneScheme(why="it takes one setting for all modules"),
        ),
        "dense": (replace(_LOST[0], by_hand=FROM_ORIGINAL),),
        "gguf": (),
    },
    always=(LackedTypes(NOT_RUN, why=SOME_TYPES),),
    decodes=True,
    remark="convert_hf_to_gguf reads the directory and decodes the codes to floats: quantise its result again",
)
