"""A causal language model of which one section at a time is in memory.

Modules come from transformers with all parameters on the meta device. The model's own forward runs with its layers
replaced by recorders, so that embeddings, positions, masks, rotary tables, the final norm and the head are computed by
the code that will serve the model, for every architecture alike.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llmcompress.arch.spec import ArchSpec
from llmcompress.errors import CheckpointError
from llmcompress.model import attention
from llmcompress.model.carried import Call, Carried, HandedOn
from llmcompress.model.changing_cache import Change, call_through
from llmcompress.model.on_demand import LookedUpRows, hold_own_weight, read_on_demand
from llmcompress.model.skeleton import kept_in_float32, skeleton
from llmcompress.store.checkpoint import Checkpoint


class Weights(Protocol):
    """The source of a model's tensors by on-disk name: a checkpoint, possibly decoded while it is read."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor: ...


class _Recorded(Exception):  # noqa: N818 (control flow, not an error)
    """Raised by a recorder to end a forward that has reached everything to record."""


class _Recorder(nn.Module):
    """Stands in for a layer: keeps the arguments of the layer's call and passes the hidden states on.

    Attributes that a model asks a layer for, such as the kind of attention, are the layer's.
    """

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.__dict__["_layer"] = layer  # not a submodule: its parameters do not belong to the outer section
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.hidden: Tensor | None = None
        self.shape: torch.Size | None = None
        self.inject: Tensor | None = None
        self.stop = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Any, ...]:
        self.hidden, self.call, self.shape = hidden_states, (args, kwargs), hidden_states.shape
        if self.stop:
            raise _Recorded
        out = hidden_states if self.inject is None else self.inject
        return out if self.outputs == 1 else (out, *map(HandedOn, range(1, self.outputs)))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)


class StreamedModel:
    """A model run section by section. One layer's weights, or the embedding and head, are in memory at a time."""

    def __init__(
        self,
        weights: Weights,
        config: Any,
        spec: ArchSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        trust_remote_code: bool = False,
        tiled_attention: bool = False,
    ) -> None:
        """tiled_attention: faster, with scores in the compute type (model/attention.py), for declared families."""
        self.weights, self.spec, self.dtype = weights, spec, dtype
        self.cache: Change | None = None  # applied to every layer's keys and values before attention reads them
        self.device = device or torch.device("cpu")
        self.config = config
        tiled = tiled_attention and not spec.observed
        if tiled:
            attention.register()
        self.causal = skeleton(config, spec, trust_remote_code, attention.NAME if tiled else None)
        self.layers: list[nn.Module] = list(self.causal.get_submodule(spec.layers).children())
        if not self.layers:
            raise CheckpointError("config.json asks for a model without layers")
        self._single = kept_in_float32(self.causal, dtype)
        for path, owner in self.causal.named_modules():  # not .to(): parameters on meta cannot be moved
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    stored = name not in owner._non_persistent_buffers_set and buffer.is_floating_point()
                    compute = self._dtype_of(f"{path}.{name}") if spec.observed and stored else buffer.dtype
                    owner._buffers[name] = buffer.to(self.device, compute)
        self._recorders = [_Recorder(layer, spec.outputs) for layer in self.layers]
        self._carried = Carried(self.layers)
        # a multimodal model looks for places of images, in ids or in embeddings
        self._wants_ids = config.get_text_config() is not config or self._carried.of_tokens
        parent_path, _, name = spec.layers.rpartition(".")
        setattr(self.causal.get_submodule(parent_path), name, nn.ModuleList(self._recorders))
        self._tail = Lock()
        self._outer: set[str] | None = None  # loaded parameters outside the layers
        self._calls: dict[tuple[int, int], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    # -- names ------------------------------------------------------------------------------------------------------

    def disk_name(self, layer: int, path: str) -> str:
        """On-disk name of a parameter `path` (below the layer) of a layer."""
        return self._found(self._below(layer, path))

    def outer_name(self, path: str) -> str:
        """On-disk name of a parameter `path` outside of the layers."""
        return self._disk_name_of(self.spec.disk_parameter(path))

    def _below(self, layer: int, path: str) -> str:
        return f"{self._prefix(layer)}{self.spec.disk_parameter(path)}"

    def _prefix(self, layer: int) -> str:
        return f"{self.spec.disk_path(self.spec.layers)}.{layer}."

    def _found(self, name: str) -> str:
        """The name in the file; CheckpointError if the file lacks the tensor."""
        found = self._lookup(name)
        if found is None:
            raise CheckpointError(
                f"tensor {name} is missing from the checkpoint", "the config does not fit the weights"
            )
        return found

    def _lookup(self, name: str) -> str | None:
        """The name in the file, or None; some checkpoints lack the prefix of the base model."""
        short = name.removeprefix(f"{getattr(self.causal, 'base_model_prefix', '')}.")
        return name if name in self.weights else short if short in self.weights else None

    @property
    def _embedding(self) -> str:
        return self.spec.disk_parameter(f"{self.spec.embed}.weight")

    @property
    def _head(self) -> str:
        return self.spec.disk_parameter(f"{self.spec.head}.weight")

    # -- sections ---------------------------------------------------------------------------------------------------

    @contextmanager
    def layer(self, number: int, on_demand: Collection[str] = ()) -> Iterator[nn.Module]:
        """A decoder layer with its weights in memory; behind the last one, what leads to the head.

        on_demand: paths of linears below the layer whose weights stay on meta and are read for every product.
        """
        if number == len(self.layers):
            with self.outer(embed=False, head=False) as causal:
                yield causal
            return
        layer = self.layers[number]
        try:
            self.refill(number, layer, on_demand)
            yield layer
        finally:
            _empty(layer)
            for path in on_demand:
                hold_own_weight(layer.get_submodule(path))

    def refill(self, number: int, layer: nn.Module, on_demand: Collection[str] = ()) -> None:
        """Read all weights of a layer again, since those in memory may have changed. on_demand: as in `layer`."""
        for path, owner in layer.named_modules():
            self._fill(owner, self._prefix(number), path, without=("weight",) if path in on_demand else ())
            if path in on_demand:
                self._leave_on_disk(owner, self._prefix(number), path)

    def _leave_on_disk(self, owner: nn.Module, prefix: str, path: str) -> None:
        """Let a linear read its weight for every product."""
        assert isinstance(owner, nn.Linear)
        like = owner.weight = nn.Parameter(owner.weight.to("meta", self.dtype), requires_grad=False)
        names = self._disk_names_of(prefix, f"{path}.weight")
        read_on_demand(owner, lambda: self._read(names, like).to(self.device, self.dtype))

    @contextmanager
    def outer(self, *, embed: bool, head: bool) -> Iterator[nn.Module]:
        """Load everything outside the layers; the embedding table and the head only if asked for.

        Of embeddings, rows are read when they are looked up, where the source's rows can be read one by one and not
        all of the model is asked for.

        Inside another `outer` that holds as much, nothing is read again.
        """
        asked = {name for name, wanted in (("embed", embed), ("head", head)) if wanted}
        if self._outer is not None and self._outer >= asked:
            yield self.causal
            return
        embedding, output = self.causal.get_submodule(self.spec.embed), self.causal.get_submodule(self.spec.head)
        tied = self.head_is_tied
        self._outer = asked
        if self._wants_ids and not (embed or (head and tied)):
            zeros = torch.zeros((), dtype=self.dtype, device=self.device).expand(embedding.weight.shape)  # type: ignore[arg-type]
            embedding._parameters["weight"] = nn.Parameter(zeros, requires_grad=False)
        try:
            for path, owner in self.causal.named_modules():
                if owner is output and not head:
                    continue
                without: tuple[str, ...] = ()
                if (owner is output and tied) or (owner is embedding and not (embed or (head and tied))):
                    without = ("weight",)
                if isinstance(owner, nn.Embedding) and not without and not (head and (embed or owner is embedding)):
                    without = ("weight",) if self._look_up(owner, path) else ()
                self._fill(owner, "", path, without)
            if head and tied:
                output._parameters["weight"] = embedding._parameters["weight"]
            yield self.causal
        finally:
            self._outer = None
            _empty(self.causal)

    def _look_up(self, owner: nn.Embedding, path: str) -> bool:
        """Leave the table of the embedding at `path` in its file, if its rows can be read one by one."""
        names = self._disk_names_of("", f"{path}.weight")
        rows = self.weights.rows(names[0]) if isinstance(self.weights, Checkpoint) and len(names) == 1 else None
        if rows is None or rows.shape != owner.weight.shape:
            return False
        owner._parameters["weight"] = LookedUpRows.of(rows, self.dtype, self.device)  # type: ignore[assignment]
        return True

    @cached_property
    def head_is_tied(self) -> bool:
        """Whether the head is the embedding: it has no tensor of its own, or config.json says so and none disagrees.

        As in transformers 5, two different tensors are never tied, whatever config.json says.
        """
        head, embedding = self._lookup(self._head), self._lookup(self._embedding)
        if head is None or embedding is None:
            return True
        if not getattr(self.causal.config, "tie_word_embeddings", False):
            return False
        return torch.equal(self.weights.read(head), self.weights.read(embedding))

    def _fill(self, owner: nn.Module, prefix: str, path: str, without: tuple[str, ...] = ()) -> None:
        """Read the parameters of the module at `path` below `prefix`, and its buffers that checkpoints hold."""
        below = f"{path}." if path else ""
        for leaf, parameter in list(owner._parameters.items()):
            if parameter is not None and leaf not in without:
                value = self._read(self._disk_names_of(prefix, f"{below}{leaf}"), parameter)
                dtype = self._dtype_of(f"{prefix}{below}{leaf}")
                owner._parameters[leaf] = nn.Parameter(value.to(self.device, dtype), requires_grad=False)
        for leaf, buffer in list(owner._buffers.items()):
            if buffer is not None and leaf not in owner._non_persistent_buffers_set:
                found = self._lookup(f"{prefix}{self.spec.disk_parameter(f'{below}{leaf}')}")
                if found is not None:  # such as the routing bias of DeepSeek
                    owner._buffers[leaf] = self._read([found], buffer).to(buffer.device, buffer.dtype)

    def _dtype_of(self, name: str) -> torch.dtype:
        """The type of a parameter or buffer: that of the model, unless transformers keeps it in float32."""
        return torch.float32 if any(part in name for part in self._single) else self.dtype

    def _disk_names_of(self, prefix: str, path: str) -> list[str]:
        """The tensors that are a parameter, one behind the other."""
        if path in self.spec.joined:
            return [self._found(f"{prefix}{part}") for part in self.spec.joined[path]]
        return [self._disk_name_of(f"{prefix}{self.spec.disk_parameter(path)}")]

    def _disk_name_of(self, name: str) -> str:
        """The tensor of a parameter; a tied embedding may be stored under the head's name alone."""
        if name == self._embedding and self._lookup(name) is None:
            return self._lookup(self._head) or self._found(name)
        return self._found(name)

    def _read(self, names: list[str], like: Tensor) -> Tensor:
        name, *more = names
        value = self.weights.read(name)
        value = torch.cat([value, *map(self.weights.read, more)]) if more else value
        if value.shape != like.shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(value.shape)}, config.json asks for {list(like.shape)}",
                "the config does not fit the weights",
            )
        return value

    # -- running ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [samples, length] to the hidden states [samples, length, hidden] that enter the first layer."""
        self.prepare(ids)
        return torch.cat(list(self.embedded(ids, 8)))

    @torch.no_grad()
    def prepare(self, ids: Tensor, layers: bool = True) -> int:
        """Record, from the first sample, what each layer is called with besides the hidden states; their width.

        layers: whether layers are going to run, and not the head alone.
        """
        ids = ids[:1].to(self.device)
        with self.outer(embed=True, head=False) as causal:
            _, others = self._recorded(causal, input_ids=_another(ids))
            hidden, calls = self._recorded(causal, input_ids=ids)
            hands_on = self._carried.learn(ids.shape, hidden, calls, others)
        self._calls[1, ids.shape[1]] = calls
        if hands_on and layers:
            with self.layer(0) as layer:
                args, kwargs = calls[0]
                self._carried.see_handed(ids.shape, layer(hidden, *args, **kwargs))
        return self._carried.packed(hidden, calls).shape[-1]

    @torch.no_grad()
    def embedded(self, ids: Tensor, batch: int) -> Iterator[Tensor]:
        """Hidden states that enter the first layer, [<= batch, length, hidden] at a time."""
        with self.outer(embed=True, head=False) as causal:
            for start in range(0, len(ids), batch):
                yield self.entering(causal, ids[start : start + batch])

    def random_rows(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """What may enter a layer, of random numbers. like: what enters the first one."""
        return self._carried.random(like, generator)

    def entering(self, causal: nn.Module, ids: Tensor) -> Tensor:
        """Hidden states that enter the first layer, within `outer(embed=True, head=False)`."""
        hidden, calls = self._run(causal, -1 if self._carried.whole_calls else 0, input_ids=ids.to(self.device))
        return self._carried.packed(hidden, calls)

    def _run(self, causal: nn.Module, last: int, **inputs: Any) -> tuple[Tensor, list[Call | None]]:
        """What enters the first layer, and the calls of the layers up to `last`."""
        self._recorders[last].stop = True
        try:
            with suppress(_Recorded):
                causal(use_cache=False, **inputs)
        finally:
            self._recorders[last].stop = False
        hidden, calls = self._recorders[0].hidden, [recorder.call for recorder in self._recorders]
        assert hidden is not None
        for recorder in self._recorders:
            recorder.hidden = recorder.call = None
        return hidden, calls

    def _recorded(self, causal: nn.Module, **inputs: Any) -> tuple[Tensor, list[Call]]:
        """What enters the first layer, and what each layer is called with; CheckpointError if one is not called."""
        hidden, found = self._run(causal, -1, **inputs)
        calls = [call for call in found if call is not None]
        shapes = {recorder.shape for recorder in self._recorders}
        if len(calls) < len(found) or len(shapes) > 1:
            raise CheckpointError(
                f"the layers of a {self.spec.name!r} model do not simply follow one another, so none can run alone"
            )
        return hidden, calls

    def _shape_of_call(self, batch: int, length: int) -> tuple[int, int]:
        # one sample's masks and rotary tables serve any batch; what an unknown family passes may not (ALiBi of Bloom)
        return (batch if self.spec.observed else 1), length

    @torch.no_grad()
    def prepare_batch(self, batch: int, length: int) -> None:
        """Record what layers are called with for hidden states of this shape; before `call` runs in several threads."""
        batch, length = self._shape_of_call(batch, length)
        if (batch, length) not in self._calls and (1, length) in self._calls:
            with self.outer(embed=False, head=False) as causal:
                _, self._calls[batch, length] = self._recorded(causal, **self._placeholder(batch, length))

    def call(self, number: int, layer: nn.Module, hidden: Tensor, watch: Change | None = None) -> Tensor:
        """A layer's output for hidden states [batch, length, hidden], called as the model itself calls it.

        Behind the last layer that is the head's, which is not loaded: a hook stops at its input.

        watch: in place of `cache`; need not be reached. CheckpointError if `cache` is not.
        """
        if number == len(self.layers):
            with self._tail:  # recorders hand the hidden states on
                return self.logits(layer, hidden)
        self.prepare_batch(*hidden.shape[:2])
        args, kwargs = self._calls[self._shape_of_call(*hidden.shape[:2])][number]
        rows = hidden
        hidden, (args, kwargs) = self._carried.opened(number, rows, (args, kwargs))
        change = watch or self.cache
        if change is None:
            out = layer(hidden, *args, **kwargs)
        else:
            out, reached = call_through(layer, number, change, (hidden, *args), kwargs)
            if watch is None and not reached:
                raise CheckpointError(f"layer {number} of this {self.spec.name!r} model keeps no keys and values")
        return self._carried.closed(number, rows, out, (args, kwargs))

    def logits(self, causal: nn.Module, hidden: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of the last layer's output, within `outer(embed=False, head=True)`.

        With gradients where `hidden` wants them.
        """
        recorders: list[_Recorder] = list(causal.get_submodule(self.spec.layers).children())  # type: ignore[arg-type]
        last = recorders[-1]  # of `causal`, which may be a copy
        last.inject = self._carried.hidden(hidden)
        try:
            with torch.set_grad_enabled(hidden.requires_grad):
                return causal(**self._placeholder(*hidden.shape[:2]), use_cache=False).logits  # type: ignore[no-any-return]
        finally:
            last.inject = None
            for recorder in recorders:
                recorder.hidden = recorder.call = None

    def read_by_head(self, rows: Tensor) -> Tensor:
        """The part [batch, length, width] that `logits` needs of what leaves the last layer."""
        return self._carried.states(rows)

    def _placeholder(self, batch: int, length: int) -> dict[str, Tensor]:
        """An input that stands for tokens of which only the number matters."""
        if self._wants_ids:
            return {"input_ids": torch.zeros(batch, length, dtype=torch.int64, device=self.device)}
        return {"inputs_embeds": torch.zeros(batch, length, self.embedding_width, dtype=self.dtype, device=self.device)}

    @property
    def streams(self) -> int:
        """How many hidden states a token has, as they enter the layers."""
        return self._carried.streams

    @property
    def embedding_width(self) -> int:
        return int(self.causal.get_submodule(self.spec.embed).weight.shape[1])  # type: ignore[index]


def _empty(module: nn.Module) -> None:
    """Free the memory of a section."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                owner._parameters[name] = nn.Parameter(empty, requires_grad=False)


def _another(ids: Tensor) -> Tensor:
    """Another text of the same length, of the same tokens where those are not all alike."""
    turned = ids.roll(1, -1)
    return turned if not torch.equal(turned, ids) else torch.where(ids > 0, ids - 1, ids + 1)
