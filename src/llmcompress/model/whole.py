"""A whole model in memory, for generating text; everything else here runs section by section."""

from contextlib import ExitStack

from torch import nn

from llmcompress.model.streamed_model import StreamedModel


def whole_model(model: StreamedModel) -> nn.Module:
    """transformers' causal model with all weights loaded and its layers put back; `model` is unusable afterwards."""
    with ExitStack() as stack:
        stack.enter_context(model.outer(embed=True, head=True))
        for number in range(len(model.layers)):
            stack.enter_context(model.layer(number))
        parent, _, name = model.spec.layers.rpartition(".")
        setattr(model.causal.get_submodule(parent), name, nn.ModuleList(model.layers))
        model.causal._sections = stack.pop_all()  # type: ignore[assignment]  # open as long as the model lives
    return model.causal
