"""What transformers accepts."""

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.grid_facts import Asymmetric, BitWidths, Groups
from llmcompress.engine.targets.machine import Devices, OnGpus
from llmcompress.engine.targets.model_facts import LostTypes, Unread
from llmcompress.engine.targets.runtimes.common import AWQ_BITS, FROM_ORIGINAL, matrices
from llmcompress.engine.targets.runtimes.gptqmodel import AWQ_GROUPS
from llmcompress.engine.targets.scheme_facts import ExpertsAlike, OneScheme
from llmcompress.engine.targets.shape_facts import Multiples
from llmcompress.formats.entry_checks import HEADS, experts_of
from llmcompress.formats.schemes import INTEGERS, kind

# as `benchmarks/models.py` found, on the versions that the target names
_LOST = (
    "bailing_hybrid", "deepseek_v4", "falcon", "falcon_mamba", "gpt_bigcode", "hy_v4", "inkling_text", "kimi_linear",
    "longcat_flash", "mamba", "mamba2", "minimax_m3_vl_text", "modernbert-decoder", "nanochat", "olmo_hybrid", "phimoe",
    "recurrent_gemma", "xlstm", "zaya",
)  # fmt: skip
_EXPERTS_LOST = (
    "aria_text", "dbrx", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jetmoe",
)  # fmt: skip
_ONE_BY_ONE = "it leaves at random values experts that it has in one tensor and that are written one by one"
_LOST_EXPERTS = Unread(
    lambda entry: experts_of(entry.module) is not None,
    why="it leaves quantised experts at random values, without an error",
)
_SPLIT_EXPERTS = Unread(
    lambda entry: entry.module.endswith(".feed_forward.experts.gate_up_proj"),
    quantised=False,
    why="it splits the experts of Llama 4 before it loads a quantised model, and finds no tensors for the parts",
)
TARGET = Target(
    "transformers",
    "transformers",
    "5.23",
    place=0,
    formats={
        "compressed-tensors": (
            LostTypes(
                _LOST,
                why="it has no codes where a class uses the weights of a linear itself or puts them together",
            ),
            LostTypes(
                _EXPERTS_LOST,
                experts=True,
                why=_ONE_BY_ONE,
            ),
            Devices(why="it needs compressed-tensors 0.18 for 3, 5 and 6 bits, which were packed otherwise before"),
            Asymmetric(
                why="with compressed-tensors 0.18 or later it takes asymmetric weights only with "
                "quantization_config=CompressedTensorsConfig(dequantize=True)"
            ),
            Unread(
                lambda entry: (
                    entry.grid is not None
                    and entry.grid.type in ("mxfp4", "mxfp8", "nvfp4")
                    and entry.source.dtype != "BF16"
                ),
                by_hand="convert the model to bfloat16 first",
                why="it decodes blocks of small floats to bfloat16, and multiplies them by no other type",
            ),
            Unread(
                lambda entry: (
                    entry.grid is not None
                    and experts_of(entry.module) is not None
                    and (
                        entry.grid.type in ("fp8-block", "mxfp8", "nvfp4") or kind(entry.grid, entry.inputs) == INTEGERS
                    )
                ),
                by_hand="give experts another --type, or use --format dense",
                why="of experts it decodes packed integers, mxfp4 and fp8 by row, and drops the factor of nvfp4 "
                "without an error",
            ),
            ExpertsAlike(
                why="it decodes all experts by one scheme, and with one of packed codes leaves none in 16 bits"
            ),
            Devices(why="it leaves the inputs of experts in 16 bits"),
            _SPLIT_EXPERTS,
        ),
        "gptq": (
            BitWidths((2, 3, 4, 8), why="GPTQModel's kernels take 2, 3, 4 and 8 bits"),
            OneScheme(why="it takes one setting for all modules (it ignores `dynamic`)"),
            Groups(
                (16, 32, 64, 128, 256, 512),
                why="GPTQModel's kernels take groups of 16, 32, 64, 128, 256 or 512, or one scale per row",
            ),
            Unread(
                lambda entry: entry.module.rpartition(".")[2] in HEADS,
                why="it leaves a quantised head at random values, without an error",
            ),
            _LOST_EXPERTS,
            Unread(lambda entry: entry.transposed, why="it has no place for codes of a Conv1D"),
            Multiples(32, 1, why="on a CPU it takes multiples of 32 outputs, as one kernel serves all modules"),
        ),
        "awq": (AWQ_BITS, AWQ_GROUPS, _LOST_EXPERTS),
        "auto-round": (
            Devices(why="it needs the package auto-round, whose own kernels for a CPU multiply in bfloat16"),
            Unread(lambda entry: experts_of(entry.module) is not None, why="it was not seen to read experts"),
        ),
        "fp8": (
            OnGpus(
                matrices(),
                least=(8, 9),
                runs=True,
                why="on GPUs before compute capability 8.9 and on CPUs it decodes to bfloat16, inputs as they are",
            ),
        ),
        "bitsandbytes": (
            Unread(
                lambda entry: experts_of(entry.module) is not None,
                why="it joins experts into one parameter, which has no place for their codes",
            ),
            _SPLIT_EXPERTS,
        ),
        "dense": (
            LostTypes(
                (*_EXPERTS_LOST, "hy_v4", "llama4_text", "minimax_m3_vl_text", "zaya"),
                experts=True,
                by_hand=FROM_ORIGINAL,
                why=_ONE_BY_ONE,
            ),
        ),
    },
    further=False,
)
