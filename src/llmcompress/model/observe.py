"""The architecture of an undeclared model, observed by running its layers once on weights that are all zero.

Hooks see in which order a layer's matrices run and which of them are handed the very same tensor. That is enough to
compress weights one by one and to share statistics. Zeros take no memory (one number, repeated), and unlike the meta
device they let code run that looks at values, such as routing. What parameters are called on disk, transformers says
(`disk_names.py`).

Routers, which decide between experts, are recognised by what they are: a matrix whose output is as wide as what a top-k
ranks or as config.json counts experts. In doubt a matrix is taken for a router, which costs a few bits and no quality.
Experts that transformers keeps as 3-D parameters become separate linears (`experts.py`) where they are separate on
disk. Others stay as they are: `left_out` names them and says why.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION
from transformers.utils.quantization_config import QuantizationMethod

from llmcompress.arch.spec import ArchSpec, Experts, Linear
from llmcompress.errors import CheckpointError
from llmcompress.isolation import probe
from llmcompress.model.disk_names import disk_names
from llmcompress.model.experts import ExpertLayout, UnfusedExperts, layout_of, unfuse
from llmcompress.model.rehearsal import LENGTH, ZeroProducts, Zeros, distinct
from llmcompress.model.skeleton import UNUSABLE, first_line, parameters_on_meta, plain, skeleton
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.expert_stacks import ExpertStack

_HINT = "declare the architecture in a file of llmcompress/arch"
_STACKED = (
    "experts in one tensor on disk, which their layout, the format or the target does not let be written one by one"
)
_FUSED = "a 3-D parameter, such as experts in one, which nothing tells how to take apart"
_LISTED = "an expert's matrix, which sees few tokens and needs a declared architecture"
_UNSEEN = "a matrix that did not run when the layer was observed"
_SIZE = 1_000_000  # bounds processor time and memory as for so many bytes: building what may be a large model
_ROUTER = "a router, or as narrow as one"


def observe(config: Any, names: Collection[str], trust_remote_code: bool = False) -> ArchSpec:
    """The architecture of transformers' `config`, observed; CheckpointError if it has no layers that can be run.

    names: of the tensors on disk.
    """
    model_type = str(getattr(config, "model_type", "unknown"))

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"a {model_type!r} model of this config cannot be run: {reason}", _HINT)

    if not trust_remote_code:  # which may do all that we may do
        probe(lambda: _observed(config, names, model_type, False), failed, _SIZE + 1000 * len(names))
    return _observed(config, names, model_type, trust_remote_code)


def _observed(config: Any, names: Collection[str], model_type: str, trust_remote_code: bool) -> ArchSpec:
    model = skeleton(config, None, trust_remote_code)
    spec, fused = _named(model, _outline(model, model_type), names)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    try:
        running, hidden = _running(spec, shapes, config, trust_remote_code)
        watched = {number: _watch(running, number, hidden) for number in distinct(running.layers)}
        if any(layer.unseen for layer in watched.values()):  # layers that are built alike may run different matrices
            watched = {number: _watch(running, number, hidden) for number in range(len(running.layers))}
    except UNUSABLE as error:
        raise CheckpointError(
            f"the layers of a {model_type!r} model could not be run to observe them: {first_line(error)}", _HINT
        ) from None

    seen = list(watched.values())
    counts = _expert_counts(plain(running.causal.config))
    narrow = {path for layer in seen for path, width in layer.widths.items() if width in counts | layer.ranked}
    narrow |= _mixing(running)
    never = {path for path in narrow if "{e}" not in path}
    experts = {path for layer in running.layers for path in _listed_experts(layer, counts)}
    paths = [path for path in _merged([list(layer.widths) for layer in seen]) if path not in never | experts]
    if not paths:
        raise CheckpointError(f"no matrices were found in the layers of a {model_type!r} model", _HINT)
    spaces = _spaces(paths, seen)
    conv1d = {path for layer in seen for path in layer.conv1d}
    left_out = {path: fused for layer in seen for path in layer.fused}
    left_out |= dict.fromkeys(sorted(experts), _LISTED)
    left_out |= dict.fromkeys(sorted(never), _ROUTER)
    left_out = {path: why for path, why in left_out.items() if path not in paths}
    left_out |= {path: _UNSEEN for layer in seen for path in layer.unseen}
    return replace(
        spec,
        outputs=running.spec.outputs,
        linears=tuple(Linear(path, reads=spaces[path], conv1d=path in conv1d) for path in paths),
        never=tuple(Linear(path, reads="") for path in sorted(never)),  # their inputs were not observed
        left_out=left_out,
        idle={number: frozenset(layer.unseen) for number, layer in watched.items() if layer.unseen},
    )


def _outline(model: nn.Module, model_type: str) -> ArchSpec:
    """The paths of layers, embedding and head."""
    names = {id(module): name for name, module in model.named_modules()}
    lists = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    layers = max(lists, key=lists.__getitem__, default="")  # of equals the outermost, which comes first
    if not layers or not lists[layers]:
        raise CheckpointError(f"no decoder layers were found in a {model_type!r} model", _HINT)
    for other, size in lists.items():
        if size > lists[layers] // 2 and not f"{other}.".startswith(f"{layers}."):
            raise CheckpointError(f"a {model_type!r} model has two stacks of layers, {layers} and {other}", _HINT)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if id(embedding) not in names or id(head) not in names:
        raise CheckpointError(f"the embedding or the head of a {model_type!r} model was not found", _HINT)
    return ArchSpec(
        name=model_type,
        model_types=(model_type,),
        linears=(),
        layers=layers,
        embed=names[id(embedding)],
        head=names[id(head)],
        observed=True,
    )


def _named(model: nn.Module, spec: ArchSpec, names: Collection[str]) -> tuple[ArchSpec, str]:
    """The spec with names on disk, and with experts where those can be taken apart, which they then are in `model`.

    Also why experts that stay fused do.
    """
    layers, blocks = _blocks(model, spec)
    found = disk_names(model, spec.layers, names, blocks)
    experts = None
    if found.separate:
        experts = Experts(tuple(blocks), number=next(iter(blocks.values())).count)
        with parameters_on_meta():
            for layer in layers:
                for path in blocks:
                    unfuse(layer, path)
    spec = replace(spec, experts=experts, disk=found.disk, joined=found.joined)
    return spec, _STACKED if found.stacked else _FUSED


def _running(
    spec: ArchSpec, shapes: Mapping[str, torch.Size], config: Any, trust_remote_code: bool
) -> tuple[StreamedModel, Tensor]:
    """The model on zeros, and the hidden states that enter its first layer; its spec says what layers return."""
    found = CheckpointError("")
    for outputs in (1, 2):
        model = StreamedModel(
            Zeros(shapes, rising=f"{spec.embed}.weight"),
            config,
            replace(spec, outputs=outputs, disk={}, joined={}),
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
        )
        try:
            with ZeroProducts():
                return model, torch.zeros_like(model.embed(torch.arange(LENGTH)[None]))
        except UNUSABLE as error:
            found = CheckpointError(
                f"a {spec.name!r} model cannot be run without its layers: {first_line(error)}", _HINT
            )
        except CheckpointError as error:
            found = error
    raise found


def _blocks(model: nn.Module, spec: ArchSpec) -> tuple[list[nn.Module], dict[str, ExpertLayout]]:
    """The layers, and by path below a layer how experts lie in blocks that can be taken apart, all of as many."""
    layers = list(model.get_submodule(spec.layers).children())
    found = {path: layout for layer in layers for path, part in layer.named_modules() if (layout := layout_of(part))}
    count = next((layout.count for layout in found.values()), 0)
    return layers, {path: layout for path, layout in found.items() if layout.count == count}


@dataclass(frozen=True)
class StackedExperts:
    """stacks: by name, how tensors hold something of every expert; their parts are named as separate tensors are, `{e}`
    for the expert's number. merged: whether transformers loads such separate tensors.
    """

    stacks: dict[str, ExpertStack]
    merged: bool


def stacked_experts(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> StackedExperts:
    """The experts among a checkpoint's tensors, given by their shapes, that are on disk as one tensor."""
    model = skeleton(config, None)
    spec = _outline(model, str(getattr(config, "model_type", "unknown")))
    layers, blocks = _blocks(model, spec)
    found = disk_names(model, spec.layers, shapes, blocks)
    prefix = found.disk.get(spec.layers, spec.layers)
    stacks = {}
    for name, (number, block, leaf) in found.stacked.items():
        stack = blocks[block].stacks[leaf]
        shape = layers[int(number)].get_parameter(f"{block}.{leaf}").shape
        if tuple(shape) != shapes[name] or (not stack.flat and shape[0] != stack.experts):
            return StackedExperts({}, False)
        whole = prefix if name.startswith(f"{prefix}.") else prefix.partition(".")[2]
        parts = tuple(f"{whole}.{number}.{block}.{{e}}.{part}" for part in stack.parts)
        stacks[name] = replace(stack, parts=parts)
    separate = [part.format(e=at) for stack in stacks.values() for part in stack.parts for at in range(stack.experts)]
    merged = disk_names(model, spec.layers, separate, blocks).merged
    return StackedExperts(stacks, merged or any(_patched(layers, block) for block in blocks))


def _patched(layers: Iterable[nn.Module], path: str) -> bool:
    """Whether transformers takes a block of experts apart before it loads a checkpoint with codes."""
    blocks = (module for layer in layers for below, module in layer.named_modules() if below == path)
    patch = MODULES_TO_PATCH_FOR_QUANTIZATION.get(type(next(blocks)).__name__, {})
    return QuantizationMethod.COMPRESSED_TENSORS in patch.get("quantization_methods", ())


class _Seen:
    """Observations of one layer, by path below the layer, with `{e}` for the number of whatever expert runs first.

    widths: output width of each matrix, in order of execution. inputs: an identity of each matrix's input tensor.
    ranked: numbers of candidates that a top-k chose from.
    """

    def __init__(self, layer: nn.Module, experts: Experts | None) -> None:
        self._experts = experts
        self.widths: dict[str, int] = {}
        self.inputs: dict[str, object] = {}
        self.ranked: set[int] = set()
        self.fused = [
            path for path, value in layer.named_parameters() if value.ndim == 3 and not _convolves(layer, path)
        ]
        self.matrices = {
            path: module for path, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)
        }
        self.conv1d = {path for path, module in self.matrices.items() if isinstance(module, Conv1D)}
        self._alive: list[Tensor] = []  # no other tensor can take the address of a living one

    @property
    def unseen(self) -> list[str]:
        return [path for path in dict.fromkeys(map(self.general, self.matrices)) if path not in self.widths]

    def general(self, path: str) -> str:
        """A path with `{e}` in place of an expert's number."""
        found = self._experts.general(path) if self._experts is not None else None
        return path if found is None else found[0]

    def hook(self, path: str, module: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        width = int(module.weight.shape[1 if path in self.conv1d else 0])  # type: ignore[index]
        path = self.general(path)

        def see(_: nn.Module, args: tuple[Any, ...]) -> None:
            if path not in self.widths and args:
                x: Tensor = args[0]
                self._alive.append(x)
                self.widths[path] = width
                # the same memory, not only the same object: some flatten the tokens before each matrix
                whole = x.is_contiguous()
                self.inputs[path] = (x.data_ptr(), x._version, x.numel(), x.shape[-1]) if whole else id(x)

        return see


class _TopK(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records the number of candidates of every top-k."""

    def __init__(self, ranked: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranked = ranked

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.topk.default:
            self.ranked.add(int(args[0].shape[-1]))
        return func(*args, **(kwargs or {}))


def _watch(model: StreamedModel, number: int, hidden: Tensor) -> _Seen:
    seen = _Seen(model.layers[number], model.spec.experts)
    with ExitStack() as stack:
        layer = stack.enter_context(model.layer(number))
        for path, module in seen.matrices.items():
            stack.callback(module.register_forward_pre_hook(seen.hook(path, module)).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(_TopK(seen.ranked))
        stack.enter_context(ZeroProducts())
        model.call(number, layer, hidden.clone())
    return seen


def _listed_experts(layer: nn.Module, counts: set[int]) -> Iterator[str]:
    """Paths of the matrices of experts that are modules of their own, in a list as long as there are experts."""
    for path, module in layer.named_modules():
        listed = isinstance(module, nn.ModuleList) and not isinstance(module, UnfusedExperts)
        if listed and 1 < len(module) in counts:
            for below, matrix in module.named_modules():
                if isinstance(matrix, nn.Linear | Conv1D):
                    yield f"{path}.{below}"


def _convolves(layer: nn.Module, path: str) -> bool:
    return isinstance(layer.get_submodule(path.rpartition(".")[0]), nn.Conv1d)


def _expert_counts(config: Mapping[str, Any]) -> set[int]:
    """All numbers that config.json gives as a count of experts; 1, since a matrix of one row is a gate."""
    found = {1}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _expert_counts(value)
        elif re.search(r"(^|_)(num|n)_([a-z]+_)*experts$", str(key)):
            found |= {count for count in (value if isinstance(value, list) else [value]) if isinstance(count, int)}
    return found


def _mixing(running: StreamedModel) -> set[str]:
    """Paths of matrices with an input or output for each of several streams of hidden states (AltUp)."""
    return {
        path
        for layer in running.layers
        for path, module in layer.named_modules()
        if running.streams > 1 and isinstance(module, nn.Linear)
        if running.streams in (module.in_features, module.out_features)
    }


def _merged(orders: list[list[str]]) -> list[str]:
    """One order of all paths that keeps each layer's; a path that only some layers have follows its predecessor."""
    merged: list[str] = []
    for order in orders:
        place = 0
        for path in order:
            if path in merged:
                place = merged.index(path) + 1
            else:
                merged.insert(place, path)
                place += 1
    return merged


def _spaces(paths: list[str], seen: list[_Seen]) -> dict[str, str]:
    """The space each path reads, named after the first that reads it: shared where every layer that has both agrees."""

    def agree(one: str, other: str) -> bool:
        both = [layer for layer in seen if one in layer.inputs and other in layer.inputs]
        return bool(both) and all(layer.inputs[one] == layer.inputs[other] for layer in both)

    members: dict[str, list[str]] = {}
    for path in paths:
        space = next((space for space, others in members.items() if all(agree(path, other) for other in others)), None)
        own = f"input of {path.replace('.{e}', '')}" + (".{e}" if "{e}" in path else "")
        members.setdefault(space or own, []).append(path)
    return {path: space for space, group in members.items() for path in group}
