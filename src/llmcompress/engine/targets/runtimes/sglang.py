"""What SGLang accepts."""

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.grid_facts import Asymmetric, BitWidths
from llmcompress.engine.targets.input_facts import RoundedInputs
from llmcompress.engine.targets.machine import OnGpus
from llmcompress.engine.targets.model_facts import LackedTypes, Unread
from llmcompress.engine.targets.runtimes.common import SOME_TYPES, integers, matrices
from llmcompress.engine.targets.runtimes.engines import (
    AS_STORED,
    BLOCKS_ALONE,
    FLOAT_INPUTS,
    FP4_INPUTS,
    FUSED,
    MARLIN_AUTO_ROUND,
    MARLIN_AWQ,
    MARLIN_GROUPS,
    NO_CLASS,
    NO_FP4_CACHE,
    ONLY_FP8_CACHE,
    TILES,
)
from llmcompress.engine.targets.scheme_facts import Beside
from llmcompress.engine.targets.shape_facts import Multiples
from llmcompress.formats.entry_checks import HEADS

# what its registry lacks, less what transformers says of its own classes
_LACKED = (
    "bailing_hybrid", "bamba", "biogpt", "bloom", "codegen", "cpmant", "falcon", "gpt_neo",
    "gpt_neox_japanese", "jamba", "lfm3", "minimax", "mpt", "olmo_hybrid", "openai-gpt",
    "recurrent_gemma", "rwkv", "xglm", "xlstm", "zamba", "zamba2",
)  # fmt: skip
_BORROWED = (
    "aria_text", "axk1", "axk2", "bitnet", "ctrl", "cwm", "diffllama", "doge", "dots1", "ernie4_5", "flex_olmo",
    "flint", "glm", "gpt_neox", "helium", "hyperclovax", "jais2", "jetmoe", "kolibri1", "minimax_m3_vl_text",
    "ministral", "modernbert-decoder", "nanochat", "nemotron", "olmo3", "phimoe", "seed_oss", "smollm3",
    "solar_open", "vaultgemma", "youtu",
)  # fmt: skip
_MARLIN_SHAPES = (
    Multiples(64, 128, why="its Marlin kernels take multiples of 64 outputs and 128 inputs"),
    Multiples(64, 64, experts=True, why="its Marlin kernels take multiples of 64 outputs and 64 inputs of an expert"),
)
_ROUNDED = RoundedInputs(
    AS_STORED,
    why="it multiplies rounded inputs by weights of int8 or fp8 with one scale per row, or by blocks of floats",
)
_CODED_HEAD = Unread(
    lambda entry: entry.grid is not None and entry.module.rpartition(".")[2] in HEADS,
    by_hand="leave --head-bits out",
    why="it was not seen to read codes of a head",
)
TARGET = Target(
    "sglang",
    "SGLang",
    "0.5.23, read, not run",
    place=4,
    always=(LackedTypes(dict.fromkeys(_LACKED, NO_CLASS), why=SOME_TYPES),),
    borrowed=_BORROWED,
    formats={
        "compressed-tensors": (
            BitWidths((4, 8), why="its kernels take 4 and 8 bits"),
            MARLIN_GROUPS,
            FUSED,
            *_MARLIN_SHAPES,
            Unread(matrices("mxfp4"), why="of mxfp4 in compressed-tensors it reads experts alone"),
            Unread(matrices("mxfp8"), why="it was not seen to read mxfp8-quantized"),
            _ROUNDED,
            TILES,
            BLOCKS_ALONE,
            FP4_INPUTS,
            OnGpus(integers, least=(8, 0), why="it multiplies int8 by int8 from compute capability 8.0 on"),
            FLOAT_INPUTS,
            ONLY_FP8_CACHE,
            _CODED_HEAD,
        ),
        "gptq": (
            BitWidths((4, 8), why="its kernels take 4 and 8 bits"),
            Asymmetric(why="of gptq checkpoints it takes symmetric grids"),
            MARLIN_GROUPS,
            FUSED,
            *_MARLIN_SHAPES,
        ),
        "awq": MARLIN_AWQ,
        "auto-round": (*MARLIN_AUTO_ROUND, *_MARLIN_SHAPES),
        "fp8": (FUSED, TILES, FLOAT_INPUTS),
        "modelopt": (
            FUSED,
            Unread(
                matrices("fp8"),
                by_hand="use --type fp8-tensor --activations fp8-tensor, or --format compressed-tensors",
                why="of fp8 in modelopt it reads one scale per matrix, and takes rows for matrices of 16 bits",
            ),
            Beside(
                "nvfp4", ("fp8-block",), why="it reads several algorithms of modelopt, and blocks, beside nvfp4 only"
            ),
            FP4_INPUTS,
            FLOAT_INPUTS,
            NO_FP4_CACHE,
        ),
        "dense": (),
    },
    tensor_parallel=True,
    fuses=True,
)
