"""What lets vLLM run on a CPU what it multiplies on GPUs alone: decoded weights, times inputs as they are.

vLLM reads config.json, makes parameters, loads and joins tensors by its own code. Where it then asks which kernel takes
a matrix, one of these is offered, which decodes what was loaded and multiplies in the type of the model. What kernels
of GPUs say of the same matrix is asked and kept. Nothing here rounds inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import vllm.model_executor.kernels.linear as linear
from vllm import _custom_ops
from vllm.model_executor.kernels.linear.mixed_precision import humming
from vllm.model_executor.kernels.linear.mixed_precision.humming import HummingLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.mxfp4.marlin import MarlinMxFp4LinearKernel
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel
from vllm.model_executor.kernels.linear.mxfp8.marlin import MarlinMxfp8LinearKernel
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm import FP8ScaledMMLinearKernel, Int8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.marlin import MarlinFP8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.experts import fused_humming_moe
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    auto_awq,
    auto_gptq,
    fp8,
    get_quantization_config,
    modelopt,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4,
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_fp8,
    compressed_tensors_moe_w8a8_int8,
    compressed_tensors_moe_w8a8_mxfp8,
    compressed_tensors_moe_wna16,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4
from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
verdicts: dict[str, set[str]] = {}
"""By kernel of GPUs, what it said of the matrices loaded since this was emptied: "yes", or why not."""


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """vLLM takes this machine for one with a GPU of compute capability 8.9 and all that its wheels for GPUs require."""
    platform = type(current_platform)
    capability = classmethod(lambda cls, device_id=0: DeviceCapability(8, 9))
    with (
        patch.object(platform, "_enum", PlatformEnum.CUDA),
        patch.object(platform, "get_device_capability", capability),
        patch.object(humming, "has_humming", lambda: True),
        patch.object(fused_humming_moe, "has_humming", lambda: True),
    ):
        yield


def ask(kernel: Any, config: Any) -> bool:
    """Whether a kernel of GPUs takes a matrix; its answer is kept."""
    with on_a_gpu():
        supported = (True, None) if issubclass(kernel, MPLinearKernel) else kernel.is_supported()
        taken, why = kernel.can_implement(config) if supported[0] else supported
    verdicts.setdefault(kernel.__name__, set()).add("yes" if taken else str(why))
    return bool(taken)


class Decoding:
    """A kernel that decodes. Loaded parameters stay; `decoded` [out, in] is what inputs are multiplied by."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.decoded = self.decode(layer)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.decoded.to(x.dtype), bias)

    def decode(self, layer: torch.nn.Module) -> torch.Tensor:
        raise NotImplementedError

    def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
        raise NotImplementedError

    def apply_block_scaled_mm(self, *_: Any) -> torch.Tensor:
        raise NotImplementedError


class Words(Decoding, MPLinearKernel):
    """Integers in words: those that vLLM's kernel for CPUs does not take."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        taken = [ask(kernel, c) for kernel in (MarlinLinearKernel, HummingLinearKernel)]
        return (True, None) if any(taken) else (False, "no kernel of GPUs takes it")

    def decode(self, layer: torch.nn.Module) -> torch.Tensor:
        inputs, outputs = self.config.partition_weight_shape
        bits = self.config.weight_type.size_bits
        words, scale, zero = self._get_weight_params(layer)
        codes = along(words.data, bits, words.packed_dim)
        codes = (codes if words.output_dim == 0 else codes.t())[:outputs, :inputs]
        factors = scale.data if scale.output_dim == 0 else scale.data.t()
        if self.config.zero_points:
            points = along(zero.data, bits, zero.packed_dim)
            points = (points if zero.output_dim == 0 else points.t())[:outputs]
        else:
            points = torch.full(factors.shape, self.config.weight_type.bias)
        return scaled(codes - points.repeat_interleave(inputs // points.shape[1], 1), factors)


class AskedOfGpus(Words):
    """Never taken: offered before vLLM's own kernels for CPUs, it asks those of GPUs."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        super().can_implement(c)
        return False, "asked"


class Floats(Decoding, FP8ScaledMMLinearKernel):
    """8-bit floats, by rows or blocks; vLLM turns those by rows around."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return ask(MarlinFP8ScaledMMLinearKernel, c), "Marlin does not take it"

    def decode(self, layer: torch.nn.Module) -> torch.Tensor:
        if getattr(layer, "weight_block_size", None):
            return tiled(layer)
        return layer.weight.t().float() * layer.weight_scale.float().reshape(-1, 1)


class Tiles(Decoding, CPUFp8BlockScaledMMKernel):
    """8-bit floats in blocks; what vLLM's own kernel for CPUs with AMX says of shapes holds."""

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        ask(MarlinFP8ScaledMMLinearKernel, config)
        return CPUFp8BlockScaledMMKernel.can_implement(config)

    def decode(self, layer: torch.nn.Module) -> torch.Tensor:
        return tiled(layer)


class Integers(Decoding, Int8ScaledMMLinearKernel):
    """Integers a byte each, with a scale for every row."""

    def decode(self, layer: torch.nn.Module) -> torch.Tensor:
        return scaled(layer.weight, layer.weight_scale)


class Mx8(Decoding, Mxfp8LinearKernel):
    """MXFP8."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return ask(MarlinMxfp8LinearKernel, c), "Marlin does not take it"

    def decode(self, layer: torch.nn.Module) -> torch.Tensor:
        return scaled(layer.weight.float(), powers(layer.weight_scale))


class Mx4(Decoding, MxFp4LinearKernel):
    """MXFP4."""

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return ask(MarlinMxFp4LinearKernel, config), "Marlin does not take it"

    def decode(self, layer: torch.nn.Module) -> torch.Tensor:
        return scaled(halves(layer.weight), powers(layer.weight_scale))


class Nv4(Decoding, NvFp4LinearKernel):
    """NVFP4; vLLM has made the factor of the tensor one that multiplies."""

    def decode(self, layer: torch.nn.Module) -> torch.Tensor:
        return scaled(halves(layer.weight), layer.weight_scale.float()) * layer.weight_global_scale.float()


def nvfp4_kernel(use_a16: bool = False) -> Nv4:
    """For vLLM's choice of a kernel, which on CPUs is none."""
    ask(MarlinNvFp4LinearKernel, NvFp4LinearLayerConfig())
    return Nv4(NvFp4LinearLayerConfig())


# --- experts, which vLLM has in one parameter for all of a layer ---


def stand_in_for_experts(method: type[FusedMoEMethodBase]) -> None:
    """A method for experts keeps its parameters and its choice of a kernel, as on a GPU, and decodes what is loaded."""
    made = method.__init__

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        with on_a_gpu():
            made(self, *arguments, **options)
        verdicts.setdefault("experts", set()).add(self.experts_cls.__name__)

    method.__init__, method.is_monolithic = make, False
    method.process_weights_after_loading, method.apply = decode_experts, multiply_experts
    method.get_fused_moe_quant_config = lambda self, layer: None


def decode_experts(self: FusedMoEMethodBase, layer: torch.nn.Module) -> None:
    layer.decoded = [decoded_experts(self, layer, part) for part in ("w13", "w2")]


def multiply_experts(
    self: FusedMoEMethodBase,
    layer: torch.nn.Module,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    first, second = layer.decoded
    total = torch.zeros_like(x)
    for expert in range(len(first)):
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(x[tokens], first[expert].to(x.dtype)).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        outputs = torch.nn.functional.linear(inner, second[expert].to(x.dtype))
        total.index_add_(0, tokens, outputs * topk_weights[tokens, choices, None].to(x.dtype))
    return total


def decoded_experts(method: FusedMoEMethodBase, layer: torch.nn.Module, part: str) -> torch.Tensor:
    """Weights [experts, out, in] of the first (w13, the gate above the other) or second matrices, as loaded."""

    def loaded(*names: str) -> torch.Tensor | None:
        found = [getattr(layer, f"{part}_{name}", None) for name in names]
        return next((tensor.data for tensor in found if tensor is not None), None)

    codes, scale = loaded("weight_packed", "qweight", "weight"), loaded("weight_scale", "weight_scale_inv", "scales")
    if codes.dtype == torch.int32:
        return words_of_experts(method, codes, scale, loaded("weight_zero_point", "qzeros"))
    values = halves(codes) if codes.dtype == torch.uint8 else codes.float()
    scale = powers(scale) if scale.dtype == torch.uint8 else scale.float()
    if getattr(method, "block_quant", False):
        scale = scale.repeat_interleave(128, 1)
    if scale.dim() < 3:  # of a matrix, of each of the two in the first, or of its rows
        scale = scale.reshape(len(scale), -1).repeat_interleave(values.shape[1] // (scale.numel() // len(scale)), 1)
        scale = scale.unsqueeze(-1)
    values = scaled(values, scale)
    divisor, factor = loaded("weight_global_scale"), loaded("weight_scale_2")
    whole = 1 / divisor if divisor is not None else factor
    if whole is None:
        return values
    whole = whole.float().reshape(len(values), -1)
    return values * whole.repeat_interleave(values.shape[1] // whole.shape[1], 1).unsqueeze(-1)


def words_of_experts(
    method: FusedMoEMethodBase, words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    """Integers in words [experts, out, in / ...], of gptq [experts, in / ..., out], of awq [experts, in, out / ...]."""
    kind = method.quant_type if hasattr(method, "quant_type") else method.quant_config.quant_type
    bits = kind.size_bits
    if isinstance(method, auto_awq.AutoAWQMoEMethod):
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        codes, zero = (along(each, bits, 2).unflatten(2, (-1, 8))[..., order].flatten(2) for each in (words, zero))
        return scaled((codes - zero.repeat_interleave(codes.shape[1] // zero.shape[1], 1)).mT, scale.mT)
    if isinstance(method, auto_gptq.AutoGPTQMoEMethod):
        return scaled(along(words, bits, 1).mT - kind.bias, scale.mT)
    codes = along(words, bits, 2)
    if zero is None or kind.has_bias():
        return scaled(codes - kind.bias, scale)
    zero = along(zero, bits, 1)
    return scaled(codes - zero.repeat_interleave(codes.shape[2] // zero.shape[2], 2), scale)


EXPERTS = (
    compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod,
    compressed_tensors_moe_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod,
    compressed_tensors_moe_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod,
    compressed_tensors_moe_w8a8_mxfp8.CompressedTensorsW8A8Mxfp8MoEMethod,
    compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod,
    compressed_tensors_moe_w8a8_int8.CompressedTensorsW8A8Int8MoEMethod,
    auto_gptq.AutoGPTQMoEMethod,
    auto_awq.AutoAWQMoEMethod,
    fp8.Fp8MoEMethod,
    modelopt.ModelOptFp8MoEMethod,
    modelopt.ModelOptNvFp4FusedMoE,
    modelopt.ModelOptMxFp8FusedMoE,
)


# --- decoding ---


def along(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Codes of `bits` bits from words of 32 along an axis: a stream, the lowest bits first."""
    words = words.movedim(axis, -1).long() & 0xFFFFFFFF
    stream = ((words.unsqueeze(-1) >> torch.arange(32)) & 1).flatten(-2)
    stream = stream[..., : stream.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
    return (stream << torch.arange(bits)).sum(-1).movedim(-1, axis)


def halves(packed: torch.Tensor) -> torch.Tensor:
    """E2M1 from bytes [out, in / 2], the low half first."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3))


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0: two to the power of a byte less 127."""
    return torch.exp2(exponents.float() - 127)


def scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values [out, in] times scales [out, groups]."""
    return values.float() * scale.float().repeat_interleave(values.shape[-1] // scale.shape[-1], -1)


def tiled(layer: torch.nn.Module) -> torch.Tensor:
    """8-bit floats [out, in] times the scale of their tile."""
    scale = getattr(layer, "weight_scale_inv", None)
    scale = (layer.weight_scale if scale is None else scale).float()
    rows, columns = layer.weight.shape
    wide = scale.repeat_interleave(layer.weight_block_size[0], 0).repeat_interleave(layer.weight_block_size[1], 1)
    return layer.weight.float() * wide[:rows, :columns]


def product(
    input: torch.Tensor,  # noqa: A002
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """What vLLM multiplies 4 bits by on a CPU, on the words as it has rearranged them: for float32, which it lacks.

    q_weight: int32 [out / 16, in * 2], of 16 outputs the codes of one input after those of another. zeros: [groups, out
    / 8].
    """
    outputs = scales.shape[1]
    codes = along(q_weight.data, 4, 1).view(outputs // 16, -1, 16).transpose(1, 2).reshape(outputs, -1)
    points = torch.full(scales.shape, 8) if zeros is None else along(zeros.data, 4, 1)
    wide = points.t().repeat_interleave(codes.shape[1] // points.shape[0], 1)
    return torch.nn.functional.linear(input, scaled(codes - wide, scales.data.t()).to(input.dtype), bias)


def rounded(input: torch.Tensor, scale: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002
    """8-bit floats under a scale that is given, which vLLM makes of matrices that it joins under one scale."""
    return (input / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def as_on_a_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of vLLM that answers for the platform."""

    def asked(*arguments: Any, **options: Any) -> Any:
        with on_a_gpu():
            return function(*arguments, **options)

    return asked


def install() -> None:
    """Offer the stand-ins, and let all that is quantised run in float32."""
    cpu = PlatformEnum.CPU
    linear._POSSIBLE_KERNELS[cpu].insert(0, AskedOfGpus)
    linear._POSSIBLE_KERNELS[cpu].append(Words)
    linear._POSSIBLE_FP8_KERNELS[cpu] = linear._POSSIBLE_WFP8A16_KERNELS[cpu] = [Floats]
    linear._POSSIBLE_FP8_BLOCK_KERNELS[cpu] = [Tiles]
    linear._POSSIBLE_INT8_KERNELS[cpu] = [Integers]
    linear._POSSIBLE_MXFP8_KERNELS[cpu], linear._POSSIBLE_MXFP4_KERNELS[cpu] = [Mx8], [Mx4]
    compressed_tensors_w4a4_nvfp4.init_nvfp4_linear_kernel = modelopt.init_nvfp4_linear_kernel = nvfp4_kernel
    _custom_ops.cpu_gemm_wna16, _custom_ops.scaled_fp8_quant = product, rounded
    for module in (auto_gptq, auto_awq):
        module.verify_marlin_supported = as_on_a_gpu(module.verify_marlin_supported)
    for name in ("get_linear_method", "get_moe_method"):
        setattr(INCWna16Scheme, name, as_on_a_gpu(getattr(INCWna16Scheme, name)))
    for method in EXPERTS:
        stand_in_for_experts(method)
    types = [torch.float16, torch.bfloat16, torch.float32]
    for name in QUANTIZATION_METHODS:
        get_quantization_config(name).get_supported_act_dtypes = classmethod(lambda cls: types)
