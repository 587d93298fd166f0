"""transformers' own modules for a config, without weights: parameters on the meta device, buffers computed."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from llmcompress.arch.spec import ArchSpec
from llmcompress.errors import CheckpointError
from llmcompress.isolation import probe
from llmcompress.model.experts import unfuse

_LARGE = 1 << 24  # elements; no buffer of a language model has as many

UNUSABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


class _LargeOnMeta(TorchFunctionMode):
    """A context that puts large tensors, only ever parameters, on meta: some systems refuse to reserve that memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            shape = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if math.prod(shape) >= _LARGE:
                return func(*args, **{**kwargs, "device": "meta"})
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which new parameters go to the meta device at once; buffers (rotary tables) are computed."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_config(path: Path, trust_remote_code: bool = False) -> Any:
    """transformers' config of a model directory; code in the directory runs only where the caller trusts it.

    Nor does a config choose code from elsewhere: which implementation of attention runs is not a property of a model.
    """

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"{path / 'config.json'} is not a config transformers can use: {reason}")

    def load() -> Any:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)

    if not trust_remote_code:  # which may do all that we may do
        probe(load, failed)  # some counts become lists as long
    try:
        config = load()
        asked = config._attn_implementation
        config._attn_implementation = asked if asked in ("eager", "sdpa") else None  # others may be a hub's kernels
        return config
    except UNUSABLE as error:
        raise failed(first_line(error)) from None


def is_known(model_type: Any) -> bool:
    """Whether transformers has code of its own for models of this type."""
    return model_type in CONFIG_MAPPING


def skeleton(
    config: Any,
    spec: ArchSpec | None,
    trust_remote_code: bool = False,
    attention: str | None = None,
    *,
    towers: bool = False,
) -> nn.Module:
    """transformers' causal model for `config`, parameters on the meta device, experts as separate linears.

    attention: implementation to use where the architecture leaves the choice. towers: whether a multimodal model keeps
    the modules that text does not run through.
    """
    config = copy.deepcopy(config)  # transformers writes its choices, such as the attention, into the config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # others stack experts into one product, whose sums come out otherwise
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}  # said even if false: None would ask the user
    if spec is not None and (spec.attention or attention) is not None:
        options["attn_implementation"] = spec.attention or attention
    with parameters_on_meta():
        try:
            model: nn.Module = _class_for(config).from_config(config, dtype=torch.float32, **options)
        except UNUSABLE as error:
            raise CheckpointError(
                f"transformers cannot build a {getattr(config, 'model_type', 'unknown')!r} model for text: "
                f"{first_line(error)}"
            ) from None
        if not towers and config.get_text_config() is not config:
            _drop_towers(model)
        if spec is not None and spec.experts is not None:
            for layer in model.get_submodule(spec.layers).children():
                for path in spec.experts.paths:
                    unfuse(layer, path)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not bool(buffer.isfinite().all()):
            raise CheckpointError(
                f"the rotary embedding of config.json is not finite ({name})", "look at rope_theta and rope_scaling"
            )
    return model.eval()


def _class_for(config: Any) -> Any:
    """The class of transformers that builds a model of a config: one for several kinds of input where it holds such."""
    many = config.get_text_config() is not config and type(config) in AutoModelForMultimodalLM._model_mapping
    return AutoModelForMultimodalLM if many else AutoModelForCausalLM


def _drop_towers(model: Any) -> None:
    """Take out of a multimodal model what is neither its language model nor around it nor its head."""
    kept = {id(model.get_decoder()), id(model.get_input_embeddings()), id(model.get_output_embeddings())}

    def look(module: nn.Module) -> None:
        for name, child in module.named_children():
            if id(child) in kept:
                continue
            if kept.isdisjoint(map(id, child.modules())):
                module._modules[name] = nn.Module()
            else:
                look(child)

    look(model)


def kept_in_float32(model: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of the names of what transformers keeps in float32 where a model computes in `dtype`."""
    kinds = ("", "_strict") if dtype == torch.float16 else ("_strict",)
    return tuple(name for kind in kinds for name in getattr(model, f"_keep_in_fp32_modules{kind}", None) or ())


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def plain(value: Any) -> Mapping[str, Any]:
    """A transformers config as plain data."""
    return value.to_dict()  # type: ignore[no-any-return]
