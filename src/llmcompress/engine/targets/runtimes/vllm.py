"""What vLLM accepts."""

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.grid_facts import Asymmetric, BitWidths, NaturalOrder
from llmcompress.engine.targets.input_facts import InputsOfExperts, RoundedInputs
from llmcompress.engine.targets.machine import Devices, OnGpus
from llmcompress.engine.targets.model_facts import LackedTypes, Unread
from llmcompress.engine.targets.runtimes.common import SOME_TYPES, caches, integers, matrices
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
    ONLY_FP8_CACHE,
    TILES,
)
from llmcompress.engine.targets.shape_facts import Words
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import HEADS, experts_of
from llmcompress.formats.schemes import INTEGERS, PACKED
from llmcompress.grids.base import PER_ROW

_SECOND = frozenset({"w2", "down_proj"})  # the last parts of names of experts' second matrices


def without_marlin(entry: Entry, widths: tuple[int, ...] = (4, 8), inner: int = 1) -> bool:
    """Whether a matrix of experts has one scale per row where vLLM does not run it by its Marlin kernels.

    widths: the bits that these take. inner: what the number of outputs of the first matrices is a multiple of there.
    """
    grid = entry.grid
    if grid is None or experts_of(entry.module) is None or grid.group_size != PER_ROW or entry.inputs is not None:
        return False
    shape = entry.in_features, entry.out_features
    hidden, between = reversed(shape) if entry.module.rpartition(".")[2] in _SECOND else shape
    return grid.type == "int" and bool(grid.bits not in widths or hidden % 128 or between % inner)


_FROM_TURING = OnGpus(matrices(), least=(7, 5), why="it runs quantised matrices on GPUs from compute capability 7.5 on")
GPTQ_HEAD = Unread(
    lambda entry: entry.module.rpartition(".")[2] in HEADS and entry.out_features % 64 > 0,
    by_hand="leave --head-bits out",
    why="of a head in gptq it takes a number of rows that is a multiple of 64",
)
# what its registry lacks, less what transformers says of its own classes
_LACKED = (
    "bailing_hybrid", "bamba", "codegen", "cpmant", "gpt_neo", "gpt_neox_japanese", "lfm3", "minimax",
    "mpt", "openai-gpt", "recurrent_gemma", "rwkv", "xglm", "xlstm", "zamba",
)  # fmt: skip
_BORROWED = (
    "aria_text", "axk2", "biogpt", "bitnet", "ctrl", "diffllama", "doge", "dots1", "helium", "jetmoe",
    "minimax_m3_vl_text", "ministral", "modernbert-decoder", "nanochat", "persimmon", "phimoe", "solar_open",
    "youtu", "zaya",
)  # fmt: skip
TARGET = Target(
    "vllm",
    "vLLM",
    "0.33, read; 0.32 run on a CPU",
    place=2,
    always=(LackedTypes(dict.fromkeys(_LACKED, NO_CLASS), why=SOME_TYPES),),
    borrowed=_BORROWED,
    formats={
        "compressed-tensors": (
            Devices(
                why="it multiplies 2, 3, 5 and 6 bits, 8 bits with zero points, and integers in groups by int8 inputs "
                "on GPUs alone, by its Humming kernels: in float16 from compute capability 7.5, in bfloat16 from 8.0"
            ),
            Asymmetric((2, 3, 4, 5, 6), experts=True, why="of asymmetric grids of 8 bits it has no kernel for experts"),
            MARLIN_GROUPS,
            Unread(
                without_marlin,
                by_hand="use --group-size 128",
                why="of experts with one scale per row it takes 4 and 8 bits, and a hidden size that is a multiple "
                "of 128",
            ),
            FUSED,
            Words(zeros=False, why="codes and zero points must fill whole 32-bit words"),
            RoundedInputs(
                AS_STORED,
                (PACKED,),
                why="it rounds inputs to int8 token by token where weights are packed, and in other ways where they "
                "are int8 or fp8 with one scale per row, or blocks of floats",
            ),
            InputsOfExperts(
                {
                    PACKED: ("none",),
                    INTEGERS: ("int8-token",),
                    "fp8": ("fp8-token",),
                    "fp8-tensor": ("fp8-tensor",),
                },
                why="it takes experts of packed integers with inputs as they are, of int8 and fp8 with inputs rounded "
                "token by token, and of fp8-tensor with those of fp8-tensor",
            ),
            TILES,
            BLOCKS_ALONE,
            _FROM_TURING,
            FP4_INPUTS,
            OnGpus(
                matrices("mxfp4", rounded=False),
                below=(10, 0),
                by_hand="use --type nvfp4, or ask for it by --activations mxfp4",
                why="on GPUs from compute capability 10.0 on it rounds inputs of mxfp4 to 4 bits unasked",
            ),
            OnGpus(
                integers,
                least=(7, 5),
                below=(10, 0),
                by_hand="use llmcompress fp8",
                why="it multiplies int8 by int8 on CPUs, and on GPUs from compute capability 7.5 to below 10.0",
            ),
            FLOAT_INPUTS,
            ONLY_FP8_CACHE,
        ),
        "gptq": (
            BitWidths((4, 8), why="its kernels take 4 and 8 bits"),
            Asymmetric(why="of gptq checkpoints it takes symmetric grids"),
            MARLIN_GROUPS,
            Unread(
                without_marlin,
                by_hand="use --group-size 128",
                why="of experts with one scale per row it takes a hidden size that is a multiple of 128",
            ),
            NaturalOrder(why="it refuses groups in activation order (desc_act)"),
            FUSED,
            Words(zeros=True, why="codes and zero points must fill whole 32-bit words"),
            GPTQ_HEAD,
        ),
        "awq": (
            *MARLIN_AWQ,
            _FROM_TURING,
            Unread(
                lambda entry: without_marlin(entry, widths=()),
                by_hand="use --group-size 128",
                why="it fails on experts of awq with one scale per row",
            ),
        ),
        "auto-round": (
            *MARLIN_AUTO_ROUND,
            _FROM_TURING,
            Unread(
                lambda entry: without_marlin(entry, inner=64),
                by_hand="use --group-size 128",
                why="of experts with one scale per row it takes a hidden size that is a multiple of 128, and an inner "
                "one of 64",
            ),
        ),
        "fp8": (FUSED, TILES, _FROM_TURING, FLOAT_INPUTS),
        "modelopt": (
            FUSED,
            Unread(
                lambda entry: (
                    entry.grid is not None
                    and experts_of(entry.module) is not None
                    and entry.grid.type in ("fp8", "fp8-block")
                ),
                by_hand="give experts --type fp8-tensor or nvfp4, or use --format compressed-tensors",
                why="of fp8 in modelopt it reads experts with one scale per matrix",
            ),
            _FROM_TURING,
            OnGpus(
                matrices("fp8", "fp8-tensor", "fp8-block", "mxfp8"),
                least=(8, 0),
                why="of modelopt it runs fp8 and mxfp8 on GPUs from compute capability 8.0 on",
            ),
            OnGpus(
                caches("nvfp4"),
                least=(8, 0),
                by_hand="use --kv-cache fp8",
                why="it caches keys and values in nvfp4 on GPUs from compute capability 8.0 on",
            ),
            OnGpus(
                caches("nvfp4"),
                least=(10, 0),
                below=(11, 0),
                heads=64,
                by_hand="use --kv-cache fp8",
                why="of heads of 64 channels it caches keys and values in nvfp4 on GPUs of compute capability 10 alone",
            ),
            FP4_INPUTS,
            FLOAT_INPUTS,
        ),
        "dense": (),
    },
    tensor_parallel=True,
    fuses=True,
)
