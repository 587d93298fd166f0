"""What engines that serve models have in common: vLLM on GPUs and on CPUs, SGLang, and TensorRT-LLM."""

from llmcompress.engine.targets.grid_facts import BitWidths, Groups, Symmetric
from llmcompress.engine.targets.machine import OnGpus
from llmcompress.engine.targets.model_facts import Unread
from llmcompress.engine.targets.runtimes.common import AWQ_BITS, caches, matrices
from llmcompress.engine.targets.scheme_facts import Alike
from llmcompress.engine.targets.shape_facts import WholeTiles, Words
from llmcompress.formats.schemes import FLOATS, HOLDS, INTEGERS

FUSED = Alike(why="it runs q, k, v as one, gate, up as one, and all experts of a layer as one, each with one scheme")
TILES = WholeTiles(why="it takes blocks of 128 x 128 that are full, in each part of what it runs as one")
BLOCKS_ALONE = Unread(
    matrices("fp8-block", rounded=False),
    by_hand="use --activations fp8-group",
    why="it fails on blocks of 8-bit floats whose inputs are not rounded",
)
AS_STORED = (INTEGERS, FLOATS, *(HOLDS[name].packed for name in ("mxfp8", "mxfp4", "nvfp4")))
"""Kinds of storage, beside packed integers, of weights whose inputs they round."""
FLOAT_INPUTS = OnGpus(
    matrices("fp8", "fp8-tensor", "fp8-block", rounded=True),
    least=(8, 9),
    runs=True,
    why="on devices without products of fp8 (before compute capability 8.9) it leaves fp8 inputs in 16 bits",
)
FP4_INPUTS = OnGpus(
    matrices("nvfp4", "mxfp4", rounded=True),
    least=(10, 0),
    runs=True,
    why="it rounds inputs to 4 bits on GPUs from compute capability 10.0 on, and leaves them in 16 bits on older ones",
)
MARLIN_GROUPS = Groups((32, 64, 128), why="its Marlin kernels take groups of 32, 64 or 128, or one scale per row")
MARLIN_AWQ = (
    AWQ_BITS,
    MARLIN_GROUPS,
    Symmetric(
        ("F16", "F32"),
        why="its Marlin kernels take asymmetric grids of awq, and its other ones no bfloat16 and no scale per row",
    ),
    FUSED,
    Words(zeros=True, why="codes and zero points must fill whole 32-bit words"),
)
MARLIN_AUTO_ROUND = (
    BitWidths((4, 8), why="its kernels for auto-round take 4 and 8 bits"),
    MARLIN_GROUPS,
    FUSED,
    Words(zeros=True, why="codes and zero points must fill whole 32-bit words"),
)
ONLY_FP8_CACHE = Unread(
    caches("int8"),
    quantised=False,
    by_hand="use --kv-cache fp8",
    why="of scales for keys and values it takes those of fp8",
)
NO_FP4_CACHE = Unread(
    caches("nvfp4"),
    quantised=False,
    by_hand="use --kv-cache fp8",
    why="it was not seen to cache keys and values in nvfp4",
)
NO_CLASS = (
    "it has no class of its own for them, and runs transformers' own only where every layer is attention that it can "
    "put its own in place of"
)
