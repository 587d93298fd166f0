"""Low-rank repair: an adapter that gives back what it can of what compression took from every matrix."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress import __version__
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.run.forward import Forward, Recording, Stream
from llmcompress.engine.run.overflow import refuse_overflow
from llmcompress.engine.source.open import open_checkpoint, round_as_stored
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.engine.structure.derived_model import calibration_facts
from llmcompress.engine.structure.lora_plan import LoraPlan, RepairTarget, bits_added, changed_targets, factors
from llmcompress.engine.structure.source_model import embedded_windows
from llmcompress.engine.write.run_report import source_record
from llmcompress.model.adapted import adapt
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.significant import significant
from llmcompress.solve.low_rank import LowRank, low_rank, output_energy
from llmcompress.stats.gram import Gram
from llmcompress.store.adapter import CONFIG, STEM, AdapterDirectory, adapter_config
from llmcompress.store.checkpoint import DTYPES
from llmcompress.store.folder import Folder
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.windows import Windows, write_windows
from llmcompress.workers import Workers

Watch = Callable[[int, int], None]


def repair(plan: LoraPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Write the adapter and return its report. RunError, PlanError where there is nothing to repair."""
    opened, options = plan.opened, plan.opened.options
    base = opened.headers.name
    output = AdapterDirectory(opened.out, overwrite=options.overwrite)
    with output as out, opened.scratch_folder(out) as (folder, workers):
        targets = changed_targets(plan)
        tokens = opened.tokens() if plan.by == "outputs" else None
        calibration = None if tokens is None else calibration_facts(tokens)
        specs = factors(targets, plan.rank)
        work = _Repair(plan, targets, watch, workers)
        made = work.by_weights() if tokens is None else work.by_outputs(tokens, folder)
        named = ((spec.name, tensor) for spec, tensor in zip(specs, made, strict=True))
        hashes = out.write_weights(specs, named, shard_bytes=1 << 62, stem=STEM)  # PEFT reads one file
        config = adapter_config(
            base,
            plan.rank,
            [item.module for item in targets],
            [item.module for item in plan.targets],
            any(item.conv1d for item in targets),
        )
        out.write_json(CONFIG, config)
        report = {
            "llmcompress": __version__,
            "format": "lora",
            "source": _facts(plan.original),
            "base": _facts(opened.headers),
            "calibration": calibration,
            "compute_dtype": opened.resources.dtype,
            "output_bytes": sum(spec.nbytes for spec in specs),
            "lora": {
                "rank": plan.rank,
                "by": plan.by,
                "bits_per_weight_added": round(bits_added(targets, plan.rank), 4),
                "matrices": work.records,
            },
            "ledger": opened.ledger.as_json(),
            "tensors": hashes,
        }
        out.write_text("README.md", _card(base, plan.rank, report))
        report = out.write_report(report)
        out.commit()
    return report


class _Repair:
    """Solves the matrices of a plan in order of execution. records: what the report says of each matrix."""

    def __init__(self, plan: LoraPlan, targets: Sequence[RepairTarget], watch: Watch, workers: Workers) -> None:
        self.plan, self.targets, self.watch, self.workers = plan, targets, watch, workers
        self.original, self.compressed = open_checkpoint(plan.original), plan.opened.checkpoint
        self.records: list[dict[str, Any]] = []

    def by_weights(self) -> Iterator[Tensor]:
        """The factors a and b of each matrix that make the error of the weights least."""
        for number, target in enumerate(self.targets):
            yield from self._tensors(self._solve([target], None, None)[0])
            self.watch(number + 1, len(self.targets))

    def by_outputs(self, tokens: Tensor, folder: Folder) -> Iterator[Tensor]:
        """The factors a and b of each matrix that make the error of its outputs on `tokens` least.

        The inputs of a matrix come from matrices that are repaired already.
        """
        opened = self.plan.opened
        model = opened.model()
        round_as_stored(model, self.compressed)
        hidden = embedded_windows(model, tokens, opened.resources.batch, folder / "0.bin")
        count = len(model.layers)
        for number in range(count):
            with model.layer(number) as layer:
                solved, hidden = self._layer(model, number, layer, hidden, folder)
            for found in solved:
                yield from self._tensors(found)
            return_freed_memory()
            self.watch(number + 1, count)

    def _layer(
        self, model: StreamedModel, number: int, layer: nn.Module, hidden: Windows, folder: Folder
    ) -> tuple[list[LowRank], Windows]:
        """The factors of the matrices of a layer, and what leaves the layer once they are repaired."""
        stages: dict[str, list[RepairTarget]] = {}
        for target in self.targets:
            if target.layer == number:
                stages.setdefault(target.space, []).append(target)
        paths = {space: group[0].path for space, group in stages.items()}
        batch = self.plan.opened.resources.batch
        stream = Stream("compressed", layer, hidden)
        forward = Forward(model, number, stream, batch, self.workers, Recording(folder, paths))
        solved: dict[str, LowRank] = {}
        handles = []
        for space, group in stages.items():
            gram = Gram(group[0].shape[1], self.workers, model.device)
            for seen in forward.inputs({space: paths[space]}):
                gram.update(seen[space])
            refuse_overflow(group[0].name, [gram], model.dtype)
            if gram.dropped:
                why = f"{gram.dropped} tokens left out of its statistics"
                self.plan.opened.ledger.note("nonfinite_inputs", group[0].name, why)
            return_freed_memory()
            for target, found in zip(group, self._solve(group, gram.finish(), model.device), strict=True):
                handles.append(adapt(layer.get_submodule(target.path), found.b, found.a))
                solved[target.name] = found
        if number + 1 < len(model.layers):
            hidden = write_windows(forward.outputs(), folder / f"{(number + 1) % 2}.bin", model.dtype)
        for handle in handles:
            handle.remove()
        return [solved[item.name] for item in self.targets if item.layer == number], hidden

    def _solve(
        self, group: Sequence[RepairTarget], hessian: Tensor | None, device: torch.device | None
    ) -> list[LowRank]:
        """The factors of matrices that read one input, rounded to the type that they are stored in."""

        def solve(target: RepairTarget) -> tuple[LowRank, dict[str, Any]]:
            weight, delta = (tensor.to(device or "cpu") for tensor in self._difference(target))
            found = low_rank(delta, hessian, self.plan.rank).to(DTYPES[target.dtype])
            energy = max(output_energy(weight, hessian), 1e-30)
            before = output_energy(delta, hessian) / energy
            after = output_energy(delta - found.product(), hessian) / energy
            return found, _record(target, before, after)

        solved = self.workers.together([lambda target=target: solve(target) for target in group])  # type: ignore[misc]
        self.records += [record for _, record in solved]
        return [found for found, _ in solved]

    def _difference(self, target: RepairTarget) -> tuple[Tensor, Tensor]:
        """The original matrix and its difference from the compressed one, both [out, in] float32."""
        name = f"{target.name}.weight"
        weight, other = (side.read_finite(name).to(torch.float32) for side in (self.original, self.compressed))
        delta = weight - other
        return (weight.T.contiguous(), delta.T.contiguous()) if target.conv1d else (weight, delta)

    def _tensors(self, found: LowRank) -> Iterator[Tensor]:
        yield found.a.cpu().contiguous()
        yield found.b.cpu().contiguous()


def _facts(headers: ModelHeaders) -> dict[str, Any]:
    stored = headers.stored if isinstance(headers, DecodedHeaders) else headers
    return {**source_record(headers), "contents_sha256": stored.contents}


def _record(target: RepairTarget, before: float, after: float) -> dict[str, Any]:
    """The record of a matrix. before, after: squared error as a share of the energy of the outputs, or weights."""
    shape = list(target.shape)
    return {"name": target.name, "shape": shape, "before": significant(before), "after": significant(after)}


def _card(base: str, rank: int, report: Mapping[str, Any]) -> str:
    matrices = report["lora"]["matrices"]
    before, after = (sum(item[key] for item in matrices) / len(matrices) for key in ("before", "after"))
    return (
        f"---\nbase_model: {base!r}\nlibrary_name: peft\ntags:\n- llmcompress\n- lora\n---\n\n"
        f"# Low-rank repair of {base}\n\n"
        f"A LoRA adapter of rank {rank} that gives back what compression took from {len(matrices)} matrices, made with "
        f"llmcompress {report['llmcompress']}. It adds {report['lora']['bits_per_weight_added']:.2f} bits per weight; "
        f"the mean error of a matrix falls from {before:.5f} to {after:.5f}.\n\n"
        "PEFT loads it upon the compressed model it was made for, and no other.\n"
    )
