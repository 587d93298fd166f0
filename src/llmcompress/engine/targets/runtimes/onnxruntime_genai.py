"""What the model builder of onnxruntime-genai accepts."""

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.grid_facts import Asymmetric, BitWidths, Groups
from llmcompress.engine.targets.model_facts import ModelTypes, Unread
from llmcompress.engine.targets.runtimes.common import AWQ_BITS
from llmcompress.engine.targets.scheme_facts import OneScheme

_ONE_SETTING = (
    Groups((16, 32, 64, 128, 256, 512), rows=False, why="its kernels take groups of the powers of two from 16 to 512"),
    OneScheme(why="it takes one setting for all matrices"),
    Unread(
        lambda entry: entry.grid is None and entry.linear and entry.block,
        quantised=False,
        by_hand="quantise all matrices of layers",
        why="it reads layers whose matrices all have codes",
    ),
)
# as tests/interop/test_onnxruntime_genai.py finds it
TARGET = Target(
    "onnxruntime-genai",
    "onnxruntime-genai",
    "0.18",
    place=7,
    formats={
        "gptq": (
            BitWidths((2, 4, 8), why="of gptq it reads 2, 4 and 8 bits"),
            Asymmetric(why="of gptq it reads symmetric grids, and takes zero points of others for others by one"),
            *_ONE_SETTING,
        ),
        "awq": (AWQ_BITS, *_ONE_SETTING),
        "dense": (),
    },
    always=(
        ModelTypes(
            ("ernie4_5", "granite", "hunyuan_v1_dense", "llama", "mistral", "qwen2", "qwen3"),
            why="it was seen to run models of types ernie4_5, granite, hunyuan_v1_dense, llama, mistral, qwen2 and "
            "qwen3",
        ),
    ),
    remark="its builder also rounds inputs, embedding and head, but not with --precision int4 --extra_options "
    "accuracy_level=1 nodes_to_exclude=/lm_head/MatMul shared_embeddings=false; seen on a CPU",
    unasked=False,
)
