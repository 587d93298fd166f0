"""Measuring the losses of a plan's tensors: windows of text, their gradients, and samples of rounded rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from llmcompress.engine.budget.type_losses import Known, Losses, measured_losses
from llmcompress.engine.plan.estimate import gradient_windows
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.process_memory import keep_freed_memory
from llmcompress.engine.run.gradient_pass import (
    EMBEDDING,
    HEAD,
    FinishedLayers,
    FisherSum,
    Found,
    TokenFisher,
    fisher_information,
)
from llmcompress.engine.run.opened_model import check_model, opened_model
from llmcompress.engine.run.tokens import tokens_for
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.open import open_checkpoint
from llmcompress.formats.gguf.imatrix import numbered
from llmcompress.formats.gguf.tensors import GGUFTensor
from llmcompress.hardware import exact_float32
from llmcompress.ledger import Ledger
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.claim import Claim
from llmcompress.store.files import writing
from llmcompress.store.folder import Folder
from llmcompress.workers import SERIAL, Workers

_MARK = ".llmcompress-gradients"
SAMPLES = 16  # windows whose gradients tell losses: sums over thousands of weights need few


@dataclass(frozen=True)
class FisherRun:
    """Runs the windows of a plan's text forward and their gradients back, in the type `dtype`.

    text: all tokens that were read [samples, length]. windows: those that run.
    """

    plan: Plan
    text: Tensor
    windows: range
    dtype: str
    checkpoint: Checkpoint

    @classmethod
    def of(cls, plan: Plan, samples: int | None = SAMPLES, dtype: str = "float32") -> "FisherRun":
        """With the text of the plan's recipe; PlanError where the text cannot be read.

        samples: how many windows, of those that the recipe asks for; None for all whose gradients the run goes by.
        """
        text = plan.recipe.calibration
        if samples is not None:
            text = text.model_copy(update={"samples": min(text.samples, samples)})
        check_model(plan.headers, plan.spec, plan.options, dtype, tiled_attention=False)
        tokens = tokens_for(text, plan.headers.path, dtype, plan.options.trust_remote_code)
        windows = gradient_windows(*tokens.shape) if samples is None else range(len(tokens))
        return cls(plan, tokens, windows, dtype, open_checkpoint(plan.headers))

    @property
    def tokens(self) -> Tensor:
        """Those that run, [windows, length]."""
        return self.text[list(self.windows)]

    @contextmanager
    def information(
        self,
        paths: Sequence[Sequence[str]],
        folder: Folder,
        watch: Callable[[int], None],
        gathering: Callable[[int, Workers], FisherSum[Any]] = lambda number, workers: TokenFisher(),
        finished: FinishedLayers | None = None,
        outside: bool = True,
    ) -> Iterator[tuple[Found, Workers]]:
        """Fisher information of the matrices at `paths` of each layer, as `fisher_information` gives it.

        Within, threads share work.
        """
        plan, options = self.plan, self.plan.options
        model = opened_model(self.checkpoint, plan.spec, self.dtype, options, tiled_attention=False)
        keep_freed_memory()
        seed = plan.recipe.calibration.seed
        with writing(folder.path), SERIAL.with_threads(plan.resources.threads) as workers, exact_float32():
            found = fisher_information(
                model, self.tokens, paths, seed, folder, workers, watch, gathering, finished, outside
            )
            yield found, workers


def measure(
    fisher_run: FisherRun,
    tensors: Sequence[GGUFTensor],
    informed: bool,
    ledger: Ledger,
    watch: Callable[[int, int], None],
) -> Losses:
    """Losses of a plan's tensors for every candidate type, measured on the text of the plan's recipe.

    informed: as for `candidates`. watch: called with how many steps are done, and of how many.
    """
    plan = fisher_run.plan
    matrices = matrices_of(plan.headers, plan.options.trust_remote_code, Ledger())
    places = {f"{ref.module}.weight": (ref.layer, ref.path) for ref in matrices.refs}
    paths: list[list[str]] = [[] for _ in range(1 + max(layer for layer, _ in places.values()))]
    for layer, below in places.values():
        paths[layer].append(below)
    gradients = 2 * len(paths) + 1
    steps, of = count(gradients + 1), gradients + len(tensors)
    beside = plan.work.with_name(f"{plan.work.name}.gradients")
    scratch = Claim(beside, _MARK, f"{beside} is in use by", "wait for it, or use another --work directory")
    with (
        scratch,
        fisher_run.information(paths, scratch, lambda done: watch(done, of)) as (found, workers),
    ):
        known = _known(tensors, places, found, ledger)
        return measured_losses(
            tensors, known, fisher_run.checkpoint.read_finite, informed, workers, lambda: watch(next(steps), of)
        )


def _known(
    tensors: Sequence[GGUFTensor], places: Mapping[str, tuple[int, str]], found: Found, ledger: Ledger
) -> dict[str, Known]:
    """Fisher information of the matrices of each tensor, for each use of a matrix; none of what layers do not run."""
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    outer: dict[str, Known] = {
        "token_embd.weight": [[found[EMBEDDING], found[HEAD]] if tied else [found[EMBEDDING]]],
        "output.weight": [[found[HEAD]]],
    }
    known: dict[str, Known] = {}
    for tensor in tensors:
        parts = outer.get(tensor.name, [])
        if not parts and places.keys() >= set(tensor.sources):
            parts = [[found[places[source]]] if places[source] in found else [] for source in tensor.sources]
        if not parts or not all(fisher.known for part in parts for fisher in part):
            parts = []
            ledger.note("budget", tensor.name, "not measured: its loss is taken to be that of others for each weight")
        unseen = [number for number, part in enumerate(parts) if not part]
        if unseen:
            ledger.note("budget", tensor.name, f"no token came to {numbered(unseen, len(parts))}")
        known[tensor.name] = parts
    return known
