"""A model whose structure is to change: opened and checked from headers, then run over text."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llmcompress.engine.plan.memory_model import MemoryModel
from llmcompress.engine.plan.pass_memory import ModelSizes
from llmcompress.engine.plan.paths import path_beside, refuse_model_itself
from llmcompress.engine.plan.resources import Resources, bounded, host_limits, usual_resources
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.process_memory import keep_freed_memory, return_freed_memory
from llmcompress.engine.run.forward import Forward, Stream
from llmcompress.engine.run.opened_model import check_model, opened_model
from llmcompress.engine.run.tokens import tokens_for, tokens_without_model
from llmcompress.engine.source.header_checks import check_length
from llmcompress.engine.source.matrix_refs import Matrices, matrices_of
from llmcompress.engine.source.multimodal import text_view
from llmcompress.engine.source.open import open_checkpoint
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.errors import PlanError
from llmcompress.ledger import Ledger
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.recipe import Calibration
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folder import Folder, HeldFile
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.output import OutputDirectory
from llmcompress.store.output_file import OutputFile, is_single
from llmcompress.store.side_files import side_files
from llmcompress.store.windows import Windows, write_windows
from llmcompress.workers import SERIAL, Workers


@dataclass(frozen=True)
class OpenModel:
    """A model, the text it is measured on, and the place where the changed model is written."""

    headers: ModelHeaders
    matrices: Matrices
    text: Calibration
    options: Options
    resources: Resources
    out: Path
    ledger: Ledger

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.headers, self.matrices.refs, self.text.length)

    def within_memory(self, memory_of: Callable[[Resources], MemoryModel]) -> "OpenModel":
        """With resources whose memory keeps within what options allow; PlanError if none do."""
        options = self.options
        free = options.threads is None, options.batch is None
        return replace(self, resources=bounded(self.resources, host_limits(options.max_memory), memory_of, free))

    @property
    def anatomy(self) -> Anatomy:
        return self.matrices.anatomy(self.headers)

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.headers)

    def tokens(self) -> Tensor:
        """Token ids [samples, length] int64."""
        return tokens_for(self.text, self.headers.path, self.resources.dtype, self.options.trust_remote_code)

    def refuse_text(self) -> None:
        """CalibrationError or another where `tokens` would raise one."""
        trusted = self.options.trust_remote_code
        tokens_without_model(self.text, self.headers.path, self.resources.dtype, trusted)

    def model(self) -> StreamedModel:
        return opened_model(self.checkpoint, self.matrices.spec, self.resources.dtype, self.options)

    @contextmanager
    def scratch_folder(self, out: OutputDirectory) -> Iterator[tuple[Folder, Workers]]:
        """A directory for hidden states within the claimed output, and threads, as long as the context lasts."""
        keep_freed_memory()
        with closing(out.scratch()) as folder, SERIAL.with_threads(self.resources.threads) as workers:
            yield folder, workers
            folder.clear()


def open_model(
    headers: ModelHeaders,
    text: Calibration,
    options: Options,
    ending: str,
    output: type[OutputDirectory] = OutputDirectory,
    runs_text: bool = True,
) -> OpenModel:
    """Open a model by its headers. ending: of the default output's name. output: the kind of directory to write.

    Raises LlmcompressError for what cannot be used.
    """
    ledger = Ledger()
    if text_view(headers).wrapper is not None:
        kind = headers.config["model_type"]
        raise PlanError(f"{headers.path} is a multimodal model ({kind}), whose structure is not changed here")
    if runs_text:
        check_length(headers, text.length)
    matrices = matrices_of(headers, options.trust_remote_code, ledger)
    out = options.out or path_beside(headers.path, ending)
    if is_single(out) and output is not OutputFile:
        raise PlanError(f"{out} is called like a GGUF file, and a directory is written", "give another --output")
    if not is_single(out) and output is OutputFile:
        raise PlanError(f"{out} is not called like a GGUF file, which is written", "give an --output ending in .gguf")
    output(out, overwrite=options.overwrite)  # refuses what it could not create or replace
    refuse_model_itself(out, headers.path)
    side_files(headers.path)  # refuses what could not be copied
    resources = usual_resources(options, text.length)
    check_model(headers, matrices.spec, options, resources.dtype)
    return OpenModel(headers, matrices, text, options, resources, out, ledger)


def embedded_windows(model: StreamedModel, tokens: Tensor, batch: int, file: HeldFile) -> Windows:
    """What enters the first layer, written to `file`. Makes the model ready to run its layers."""
    with model.outer(embed=True, head=False):
        model.prepare(tokens[:1])
        return write_windows(model.embedded(tokens, batch), file, model.dtype)


def layer_outputs(
    model: StreamedModel,
    number: int,
    layer: torch.nn.Module,
    hidden: Windows,
    batch: int,
    file: HeldFile,
    workers: Workers,
) -> Windows:
    """What leaves a layer, written to `file`. That may be the file of `hidden`: windows are read before written."""
    forward = Forward(model, number, Stream("whole", layer, hidden), batch, workers)
    windows = write_windows(forward.outputs(), file, model.dtype)
    return_freed_memory()
    return windows
