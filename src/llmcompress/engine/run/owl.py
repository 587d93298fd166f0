"""How sparse each layer becomes, where layers with many outliers are to keep more weights (OWL).

OWL (Yin et al., 2023, arXiv:2310.05175, section 3.2) is measured on the uncompressed model, before the first layer is
compressed: what it gives is a plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.run.collect import outputs_with_energy
from llmcompress.engine.run.forward import Forward, Stream
from llmcompress.engine.run.installed import has_module
from llmcompress.engine.run.overflow import refuse_overflow
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.stats.energy import Energy
from llmcompress.store.folder import Folder
from llmcompress.store.windows import write_windows
from llmcompress.workers import Workers

WINDOWS = 16  # of the calibration set: shares of hundreds of thousands of weights need no more


def with_owl_sparsities(plan: Plan, model: StreamedModel, tokens: Tensor, scratch: Folder, workers: Workers) -> Plan:
    """The plan with the sparsity of each layer as OWL measures it; the plan itself where its pruner does not ask.

    scratch: for hidden states meanwhile.
    """
    pruner = plan.recipe.pruner
    if pruner is None or pruner.allocation != "owl":
        return plan
    shares = _outlier_shares(plan, model, tokens, scratch, pruner.owl_threshold, workers)
    weights = [_pruned_weights(matrices) for matrices in plan.layers]
    narrowest = min((matrix.entry.in_features for matrix in plan.matrices if matrix.pruner), default=1)
    most = 1 - 1 / narrowest  # a row keeps a weight
    return with_layer_sparsities(plan, layer_sparsities(shares, weights, pruner.share, pruner.owl_span, most))


def _outlier_shares(
    plan: Plan, model: StreamedModel, tokens: Tensor, scratch: Folder, threshold: float, workers: Workers
) -> list[float]:
    """Of each layer the share of outliers among |w| |x| of its matrices.

    An outlier is larger than `threshold` times the mean of its matrix.
    """
    shares: list[float] = []
    files = [scratch / f"record-owl-{workers.rank}-{number}.bin" for number in range(2)]  # ranks may share the folder
    try:
        with model.outer(embed=True, head=False):
            model.prepare(tokens[:1])
            hidden = write_windows(model.embedded(tokens[:WINDOWS], plan.batch), files[0], model.dtype)
        for number, matrices in enumerate(plan.layers):
            found: dict[str, Energy] = {}
            with model.layer(number) as layer:
                forward = Forward(model, number, Stream("dense", layer, hidden), plan.batch, workers)
                spaces = {matrix.space: matrix.path for matrix in matrices if has_module(layer, matrix.path)}
                hidden = write_windows(
                    outputs_with_energy(forward, spaces, found), files[(number + 1) % 2], model.dtype
                )
                for matrix in matrices:
                    if matrix.space in found:
                        refuse_overflow(matrix.module, [found[matrix.space]], model.dtype, matrix.expert is not None)
                shares.append(_outlier_share(matrices, layer, found, threshold))
            return_freed_memory()
    finally:
        for file in files:
            file.unlink()
    return shares


def _outlier_share(
    matrices: Sequence[MatrixPlan], layer: nn.Module, found: Mapping[str, Energy], threshold: float
) -> float:
    """Share of a layer's weights that are outliers; what no token came to, or no layer runs, has none."""
    outliers = total = 0
    for matrix in matrices:
        if matrix.pruner is None:
            continue
        total += matrix.entry.out_features * matrix.entry.in_features
        if matrix.space in found and has_module(layer, matrix.path):
            weight: Tensor = layer.get_submodule(matrix.path).weight  # type: ignore[assignment]
            score = (weight.T if matrix.conv1d else weight).detach().to(torch.float32).abs()
            score = score * found[matrix.space].mean().sqrt().to(score.device)
            outliers += int((score > threshold * score.mean()).sum())
    return outliers / max(total, 1)


def layer_sparsities(
    outliers: Sequence[float], weights: Sequence[int], sparsity: float, span: float, most: float
) -> list[float]:
    """Sparsity of each layer: the more outliers, the less sparsity, linearly in their share.

    weights: of each layer, those that are pruned. The sparsities are spread over twice `span`, or less where one would
    be below zero or above `most`, and their mean over all weights is `sparsity`. A layer without such weights has it.
    """
    shares = [share for share, count in zip(outliers, weights, strict=True) if count]
    if not shares or max(shares) == min(shares):
        return [sparsity] * len(outliers)
    least, width = min(shares), max(shares) - min(shares)
    places = [(share - least) / width for share in outliers]  # 0: most sparse, 1: least sparse
    middle = sum(place * count for place, count in zip(places, weights, strict=True)) / sum(weights)
    spread = max(min(2 * span, sparsity / (1 - middle), (most - sparsity) / middle), 0.0)
    return [
        sparsity + spread * (middle - place) if count else sparsity
        for place, count in zip(places, weights, strict=True)
    ]


def with_layer_sparsities(plan: Plan, sparsities: Sequence[float]) -> Plan:
    """The plan with a sparsity for each layer, of those matrices that no pattern of `set` gave another."""
    pruner = plan.recipe.pruner
    assert pruner is not None

    def given(matrix: MatrixPlan, sparsity: float) -> MatrixPlan:
        if matrix.pruner is None or matrix.pruner.sparsity != pruner.sparsity:
            return matrix
        return replace(matrix, pruner=matrix.pruner.model_copy(update={"sparsity": sparsity}))

    layers = tuple(
        tuple(given(matrix, sparsity) for matrix in layer)
        for layer, sparsity in zip(plan.layers, sparsities, strict=True)
    )
    return replace(plan, layers=layers)


def _pruned_weights(matrices: Sequence[MatrixPlan]) -> int:
    return sum(matrix.entry.out_features * matrix.entry.in_features for matrix in matrices if matrix.pruner)
