"""What each runtime's loader and kernels accept. To add a runtime, add a `Target`; nothing else knows their names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from llmcompress.engine.targets.facts import (
    Alike,
    Asymmetric,
    Beside,
    BitWidths,
    Devices,
    ExpertsAlike,
    Fact,
    Groups,
    InputsOfExperts,
    LackedTypes,
    LostTypes,
    ModelTypes,
    Multiples,
    NaturalOrder,
    OneScheme,
    RoundedInputs,
    ScalesByToken,
    Schemes,
    Symmetric,
    Unread,
    WholeTiles,
    Words,
)
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import HEADS, experts_of
from llmcompress.formats.gguf.refused import NOT_RUN
from llmcompress.formats.kv_cache import OPTION
from llmcompress.formats.schemes import FLOATS, HOLDS, INTEGERS, PACKED, kind
from llmcompress.grids.base import PER_ROW


@dataclass(frozen=True)
class Target:
    """One runtime. name: as on the command line. title: as in a sentence. checked: the version the facts are of.

    formats: what it reads, the best first, each with the facts that limit it. always: facts that limit every format.
    borrowed: model types that it runs by transformers' own classes. tensor_parallel: matrices are split over devices.
    fuses: q, k, v and gate, up run as one linear each. decodes: codes are read only to be decoded, so that nothing is
    lost by writing decoded weights. further: it loads layers after the last. remark: what a user of it should know.
    unasked: whether the ledger says that it does not load a result where no target is named.
    """

    name: str
    title: str
    checked: str
    formats: Mapping[str, tuple[Fact, ...]] = field(default_factory=dict)
    always: tuple[Fact, ...] = ()
    borrowed: tuple[str, ...] = ()
    tensor_parallel: bool = False
    fuses: bool = False
    decodes: bool = False
    further: bool = True
    remark: str = ""
    unasked: bool = True


_MARLIN_GROUPS = Groups((32, 64, 128), why="its Marlin kernels take groups of 32, 64 or 128, or one scale per row")
_FUSED = Alike(why="it runs q, k, v as one, gate, up as one, and all experts of a layer as one, each with one scheme")
_AS_STORED = (INTEGERS, FLOATS, *(HOLDS[name].packed for name in ("mxfp8", "mxfp4", "nvfp4")))
_ROUNDED = RoundedInputs(
    _AS_STORED,
    why="it multiplies rounded inputs by weights of int8 or fp8 with one scale per row, or by blocks of floats",
)
_FLOAT_DEVICES = "on devices without products of fp8 (before compute capability 8.9) it leaves fp8 inputs in 16 bits"
_FP4_DEVICES = "it rounds inputs to 4 bits on GPUs from compute capability 10.0 on"
_MARLIN_SHAPES = (
    Multiples(64, 128, why="its Marlin kernels take multiples of 64 outputs and 128 inputs"),
    Multiples(64, 64, experts=True, why="its Marlin kernels take multiples of 64 outputs and 64 inputs of an expert"),
)
_AWQ_GROUPS = Groups(
    (32, 64, 128), why="GPTQModel's kernels for awq take groups of 32, 64 or 128, or one scale per row"
)
_AWQ_BITS = BitWidths((4,), why="awq has 4 bits")
_AWQ = (
    _AWQ_BITS,
    _MARLIN_GROUPS,
    Symmetric(
        ("F16", "F32"),
        why="its Marlin kernels take asymmetric grids of awq, and its other ones no bfloat16 and no scale per row",
    ),
    _FUSED,
    Words(zeros=True, why="codes and zero points must fill whole 32-bit words"),
)
_INC = (
    BitWidths((4, 8), why="its kernels for auto-round take 4 and 8 bits"),
    _MARLIN_GROUPS,
    _FUSED,
    Words(zeros=True, why="codes and zero points must fill whole 32-bit words"),
)
_SECOND = frozenset({"w2", "down_proj"})  # the last parts of names of experts' second matrices


def _without_marlin(entry: Entry, widths: tuple[int, ...] = (4, 8), inner: int = 1) -> bool:
    """Whether a matrix of experts has one scale per row where vLLM does not run it by its Marlin kernels.

    widths: the bits that these take. inner: what the number of outputs of the first matrices is a multiple of there.
    """
    grid = entry.grid
    if grid is None or experts_of(entry.module) is None or grid.group_size != PER_ROW or entry.inputs is not None:
        return False
    shape = entry.in_features, entry.out_features
    hidden, between = reversed(shape) if entry.module.rpartition(".")[2] in _SECOND else shape
    return grid.type == "int" and bool(grid.bits not in widths or hidden % 128 or between % inner)


_LOST_EXPERTS = Unread(
    lambda entry: experts_of(entry.module) is not None,
    why="it leaves quantised experts at random values, without an error",
)

_SPLIT_EXPERTS = Unread(
    lambda entry: entry.module.endswith(".feed_forward.experts.gate_up_proj"),
    quantised=False,
    why="it splits the experts of Llama 4 before it loads a quantised model, and finds no tensors for the parts",
)

_ONLY_FP8 = Unread(
    lambda entry: entry.options.get(OPTION) == "int8",
    quantised=False,
    by_hand="use --kv-cache fp8",
    why="of scales for keys and values it takes those of fp8",
)


def _unread(grid: str, why: str) -> Unread:
    return Unread(lambda entry: entry.grid is not None and entry.grid.type == grid, why=why)


_BLOCKS_ALONE = Unread(
    lambda entry: entry.grid is not None and entry.grid.type == "fp8-block" and entry.inputs is None,
    by_hand="use --activations fp8-group",
    why="it fails on blocks of 8-bit floats whose inputs are not rounded",
)
_TILES = WholeTiles(why="it takes blocks of 128 x 128 that are full, in each part of what it runs as one")


# as `benchmarks/models.py` found, on the versions that the target names
_LOST_IN_TRANSFORMERS = (
    "bailing_hybrid", "deepseek_v4", "falcon", "falcon_mamba", "gpt_bigcode", "hy_v4", "inkling_text", "kimi_linear",
    "longcat_flash", "mamba", "mamba2", "minimax_m3_vl_text", "modernbert-decoder", "nanochat", "olmo_hybrid", "phimoe",
    "recurrent_gemma", "xlstm", "zaya",
)  # fmt: skip
_EXPERTS_LOST_IN_TRANSFORMERS = (
    "aria_text", "dbrx", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jetmoe",
)  # fmt: skip
_ONE_BY_ONE = "it leaves at random values experts that it has in one tensor and that are written one by one"
_FROM_ORIGINAL = "start from the original, whose experts lie in one tensor"
_TRANSFORMERS = Target(
    "transformers",
    "transformers",
    "5.23",
    {
        "compressed-tensors": (
            LostTypes(
                _LOST_IN_TRANSFORMERS,
                why="it has no codes where a class uses the weights of a linear itself or puts them together",
            ),
            LostTypes(
                _EXPERTS_LOST_IN_TRANSFORMERS,
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
                    and entry.source.dtype == "F16"
                ),
                by_hand="convert the model to bfloat16 first",
                why="it decodes blocks of small floats to bfloat16, and does not multiply them by float16",
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
        "awq": (_AWQ_BITS, _AWQ_GROUPS, _LOST_EXPERTS),
        "auto-round": (
            Devices(why="it needs the package auto-round, whose own kernels for a CPU multiply in bfloat16"),
            Unread(lambda entry: experts_of(entry.module) is not None, why="it was not seen to read experts"),
        ),
        "fp8": (
            Devices(why="on GPUs before compute capability 8.9 and on CPUs it decodes to bfloat16, inputs as they are"),
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
                (*_EXPERTS_LOST_IN_TRANSFORMERS, "hy_v4", "llama4_text", "minimax_m3_vl_text", "zaya"),
                experts=True,
                by_hand=_FROM_ORIGINAL,
                why=_ONE_BY_ONE,
            ),
        ),
    },
    further=False,
)
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
_GPTQMODEL = Target(
    "gptqmodel",
    "GPTQModel",
    "7.7",
    {
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
        "awq": (_AWQ_BITS, _AWQ_GROUPS, *_RENAMED),
        "dense": (),
    },
    further=False,
)
_GPTQ_HEAD = Unread(
    lambda entry: entry.module.rpartition(".")[2] in HEADS and entry.out_features % 64 > 0,
    by_hand="leave --head-bits out",
    why="of a head in gptq it takes a number of rows that is a multiple of 64",
)
_CODED_HEAD = Unread(
    lambda entry: entry.grid is not None and entry.module.rpartition(".")[2] in HEADS,
    by_hand="leave --head-bits out",
    why="it was not seen to read codes of a head",
)
_SOME_TYPES = "it does not run some types of models"
# what the registries of engines lack, less what transformers says of its own classes
_NO_CLASS = (
    "it has no class of its own for them, and runs transformers' own only where every layer is attention that it can "
    "put its own in place of"
)
_LACKED_BY_VLLM = (
    "bailing_hybrid", "bamba", "codegen", "cpmant", "gpt_neo", "gpt_neox_japanese", "lfm3", "minimax",
    "mpt", "openai-gpt", "recurrent_gemma", "rwkv", "xglm", "xlstm", "zamba",
)  # fmt: skip
_BORROWED_BY_VLLM = (
    "aria_text", "axk2", "biogpt", "bitnet", "ctrl", "diffllama", "doge", "dots1", "helium", "jetmoe",
    "minimax_m3_vl_text", "ministral", "modernbert-decoder", "nanochat", "persimmon", "phimoe", "solar_open",
    "youtu", "zaya",
)  # fmt: skip
_VLLM = Target(
    "vllm",
    "vLLM",
    "0.33",
    always=(LackedTypes(dict.fromkeys(_LACKED_BY_VLLM, _NO_CLASS), why=_SOME_TYPES),),
    borrowed=_BORROWED_BY_VLLM,
    formats={
        "compressed-tensors": (
            Devices(
                why="it multiplies 2, 3, 5 and 6 bits, 8 bits with zero points, and integers in groups by int8 inputs "
                "on GPUs alone, by its Humming kernels: in float16 from compute capability 7.5, in bfloat16 from 8.0"
            ),
            Asymmetric((2, 3, 4, 5, 6), experts=True, why="of asymmetric grids of 8 bits it has no kernel for experts"),
            _MARLIN_GROUPS,
            Unread(
                _without_marlin,
                by_hand="use --group-size 128",
                why="of experts with one scale per row it takes 4 and 8 bits, and a hidden size that is a multiple "
                "of 128",
            ),
            _FUSED,
            Words(zeros=False, why="codes and zero points must fill whole 32-bit words"),
            RoundedInputs(
                _AS_STORED,
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
            _TILES,
            _BLOCKS_ALONE,
            Devices(
                why="it rounds inputs to 4 bits on GPUs from compute capability 10.0 on, those of mxfp4 unasked, and "
                "leaves them in 16 bits on older ones"
            ),
            Devices(why="it multiplies int8 by int8 on CPUs, and on GPUs from compute capability 7.5 to below 10.0"),
            Devices(why=_FLOAT_DEVICES),
            _ONLY_FP8,
        ),
        "gptq": (
            BitWidths((4, 8), why="its kernels take 4 and 8 bits"),
            Asymmetric(why="of gptq checkpoints it takes symmetric grids"),
            _MARLIN_GROUPS,
            Unread(
                _without_marlin,
                by_hand="use --group-size 128",
                why="of experts with one scale per row it takes a hidden size that is a multiple of 128",
            ),
            NaturalOrder(why="it refuses groups in activation order (desc_act)"),
            _FUSED,
            Words(zeros=True, why="codes and zero points must fill whole 32-bit words"),
            _GPTQ_HEAD,
        ),
        "awq": (
            *_AWQ,
            Unread(
                lambda entry: _without_marlin(entry, widths=()),
                by_hand="use --group-size 128",
                why="it fails on experts of awq with one scale per row",
            ),
        ),
        "auto-round": (
            *_INC,
            Unread(
                lambda entry: _without_marlin(entry, inner=64),
                by_hand="use --group-size 128",
                why="of experts with one scale per row it takes a hidden size that is a multiple of 128, and an inner "
                "one of 64",
            ),
        ),
        "fp8": (_FUSED, _TILES, Devices(why=_FLOAT_DEVICES)),
        "modelopt": (
            _FUSED,
            Unread(
                lambda entry: (
                    entry.grid is not None
                    and experts_of(entry.module) is not None
                    and entry.grid.type in ("fp8", "fp8-block")
                ),
                by_hand="give experts --type fp8-tensor or nvfp4, or use --format compressed-tensors",
                why="of fp8 in modelopt it reads experts with one scale per matrix",
            ),
            Devices(why=_FP4_DEVICES),
            Devices(why=_FLOAT_DEVICES),
        ),
        "dense": (),
    },
    tensor_parallel=True,
    fuses=True,
)

_CPU_SHAPES = Multiples(32, 32, why="its product of 4 bits takes multiples of 32 outputs and inputs")
_CPU_FOUR = Devices(why="it multiplies 4 bits on processors with AVX-512")
_CPU_BLOCKS = Devices(why="it multiplies blocks of fp8, and experts, on processors with AMX")
_CPU_FEW = BitWidths((4,), why="it multiplies 4 bits")
_CPU_NO_EXPERTS = Unread(
    lambda entry: experts_of(entry.module) is not None,
    by_hand="use --format compressed-tensors",
    why="of experts it was not seen to run these",
)
_CPU_ROWS = Unread(
    lambda entry: _without_marlin(entry, widths=()),
    by_hand="use --group-size 128",
    why="of experts of 4 bits it takes groups, and fails on rows or gives no numbers",
)
# as tests/interop/test_vllm_loading.py finds it without stand-ins
_VLLM_CPU = Target(
    "vllm-cpu",
    "vLLM on a CPU",
    "0.32",
    always=_VLLM.always,
    borrowed=_BORROWED_BY_VLLM,
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
            _CPU_ROWS,
            _FUSED,
            _CPU_SHAPES,
            _TILES,
            _CPU_FOUR,
            _CPU_BLOCKS,
            Devices(why="its product of int8 by int8 saturates on processors without VNNI"),
            Devices(why="it caches keys and values in fp8 on processors with AVX-512 or AMX"),
            _ONLY_FP8,
        ),
        "gptq": (
            _CPU_FEW,
            Asymmetric(why="of gptq checkpoints it takes symmetric grids"),
            _MARLIN_GROUPS,
            NaturalOrder(why="it refuses groups in activation order (desc_act)"),
            _FUSED,
            _CPU_SHAPES,
            _CPU_ROWS,
            _GPTQ_HEAD,
            _CPU_FOUR,
        ),
        "awq": (_AWQ_BITS, _MARLIN_GROUPS, _FUSED, _CPU_SHAPES, _CPU_ROWS, _CPU_FOUR),
        "auto-round": (_CPU_FEW, _MARLIN_GROUPS, _FUSED, _CPU_SHAPES, _CPU_NO_EXPERTS, _CPU_FOUR),
        "fp8": (_FUSED, _TILES, _CPU_BLOCKS),
        "modelopt": (
            Schemes(
                (("fp8", 8, "fp8-token"), ("fp8-tensor", 8, "fp8-tensor"), ("fp8-block", 8, "fp8-group")),
                by_hand="use --format compressed-tensors",
                why="of modelopt it multiplies fp8",
            ),
            _CPU_NO_EXPERTS,
            _FUSED,
            _TILES,
            _CPU_BLOCKS,
        ),
        "dense": (),
    },
    fuses=True,
    unasked=False,
)

_LACKED_BY_SGLANG = (
    "bailing_hybrid", "bamba", "biogpt", "bloom", "codegen", "cpmant", "falcon", "gpt_neo",
    "gpt_neox_japanese", "jamba", "lfm3", "minimax", "mpt", "olmo_hybrid", "openai-gpt",
    "recurrent_gemma", "rwkv", "xglm", "xlstm", "zamba", "zamba2",
)  # fmt: skip
_BORROWED_BY_SGLANG = (
    "aria_text", "axk1", "axk2", "bitnet", "ctrl", "cwm", "diffllama", "doge", "dots1", "ernie4_5", "flex_olmo",
    "flint", "glm", "gpt_neox", "helium", "hyperclovax", "jais2", "jetmoe", "kolibri1", "minimax_m3_vl_text",
    "ministral", "modernbert-decoder", "nanochat", "nemotron", "olmo3", "phimoe", "seed_oss", "smollm3",
    "solar_open", "vaultgemma", "youtu",
)  # fmt: skip
_SGLANG = Target(
    "sglang",
    "SGLang",
    "0.5.23, read, not run",
    always=(LackedTypes(dict.fromkeys(_LACKED_BY_SGLANG, _NO_CLASS), why=_SOME_TYPES),),
    borrowed=_BORROWED_BY_SGLANG,
    formats={
        "compressed-tensors": (
            BitWidths((4, 8), why="its kernels take 4 and 8 bits"),
            _MARLIN_GROUPS,
            _FUSED,
            *_MARLIN_SHAPES,
            _unread("mxfp4", "of mxfp4 in compressed-tensors it reads experts alone"),
            _unread("mxfp8", "it was not seen to read mxfp8-quantized"),
            _ROUNDED,
            _TILES,
            _BLOCKS_ALONE,
            Devices(why=_FP4_DEVICES),
            Devices(why="it multiplies int8 by int8 from compute capability 8.0 on"),
            Devices(why=_FLOAT_DEVICES),
            _ONLY_FP8,
            _CODED_HEAD,
        ),
        "gptq": (
            BitWidths((4, 8), why="its kernels take 4 and 8 bits"),
            Asymmetric(why="of gptq checkpoints it takes symmetric grids"),
            _MARLIN_GROUPS,
            _FUSED,
            *_MARLIN_SHAPES,
        ),
        "awq": _AWQ,
        "auto-round": (*_INC, *_MARLIN_SHAPES),
        "fp8": (_FUSED, _TILES, Devices(why=_FLOAT_DEVICES)),
        "modelopt": (
            _FUSED,
            Unread(
                lambda entry: entry.grid is not None and entry.grid.type == "fp8",
                by_hand="use --type fp8-tensor --activations fp8-tensor, or --format compressed-tensors",
                why="of fp8 in modelopt it reads one scale per matrix, and takes rows for matrices of 16 bits",
            ),
            Beside(
                "nvfp4", ("fp8-block",), why="it reads several algorithms of modelopt, and blocks, beside nvfp4 only"
            ),
            Devices(why=_FP4_DEVICES),
            Devices(why=_FLOAT_DEVICES),
        ),
        "dense": (),
    },
    tensor_parallel=True,
    fuses=True,
)
_LOST_IN_LLAMA_CPP = (
    LostTypes(
        ("dbrx", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "llama4_text"),
        experts=True,
        why="it looks for experts in one tensor, and they are written one by one",
    ),
    LostTypes(("gemma3n_text",), why="it finds no scales of some codes"),
)
_LLAMA_CPP = Target(
    "llama.cpp",
    "llama.cpp's converter",
    "build 11434",
    {
        "compressed-tensors": (
            *_LOST_IN_LLAMA_CPP,
            BitWidths((2, 4, 8), why="it reads 2, 4 and 8 bits"),
            OneScheme(order=True, why="it takes one config group"),
            _unread("mxfp4", "it knows no mxfp4-pack-quantized"),
            _unread("mxfp8", "it knows no mxfp8-quantized"),
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
            *_LOST_IN_LLAMA_CPP,
            BitWidths((2, 4, 8), why="it reads 2, 4 and 8 bits"),
            OneScheme(why="it takes one setting for all modules"),
        ),
        "dense": (replace(_LOST_IN_LLAMA_CPP[0], by_hand=_FROM_ORIGINAL),),
        "gguf": (),
    },
    always=(LackedTypes(NOT_RUN, why=_SOME_TYPES),),
    decodes=True,
    remark="convert_hf_to_gguf reads the directory and decodes the codes to floats: quantise its result again",
)

# those whose logits were compared; others fail on keys of config.json that transformers 5 writes anew
_SEEN_IN_MLX = (
    "afmoe", "dbrx", "dots1", "ernie4_5", "falcon_mamba", "gemma4_text", "glm4", "gptj", "granite", "granitemoe",
    "helium", "hunyuan_v1_dense", "internlm3", "iquestcoder", "llama", "mamba", "ministral3", "mistral", "mixtral",
    "nemotron", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "recurrent_gemma", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
_MLX_LM = Target(
    "mlx-lm",
    "mlx-lm",
    "0.32.2",
    {
        "mlx": (
            ModelTypes(
                _SEEN_IN_MLX,
                why="it was seen to run codes of llama, mistral, mixtral, qwen2, qwen3 and 27 other model types",
            ),
        ),
    },
    remark="on Apple's machines, and on Linux on a processor",
)

TARGETS: Mapping[str, Target] = {
    target.name: target for target in (_TRANSFORMERS, _GPTQMODEL, _VLLM, _VLLM_CPU, _SGLANG, _LLAMA_CPP, _MLX_LM)
}
