"""Writing a model whose structure has changed: weights, config, report and card, whole or not at all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmcompress import __version__
from llmcompress.calib.base import fingerprint
from llmcompress.engine.structure.source_model import OpenModel
from llmcompress.engine.write.publish import model_title
from llmcompress.engine.write.run_report import source_record
from llmcompress.formats.base import TensorSpec
from llmcompress.formats.card import model_card
from llmcompress.formats.front_matter import beginning_of_readme
from llmcompress.store.output import OutputDirectory
from llmcompress.store.weight_files import weights_nbytes


@dataclass(frozen=True)
class DerivedModel:
    """The files of the changed model. config: the new config.json. specs: of the tensors to write, in order."""

    config: Mapping[str, Any]
    specs: Sequence[TensorSpec]
    shard_size: int | None = None

    @property
    def nbytes(self) -> int:
        """Exact bytes of the weight files and their index."""
        return weights_nbytes(self.specs, self.shard_size)

    def write(self, opened: OpenModel, out: OutputDirectory, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Write weights, config.json and side files; returns the SHA-256 of each tensor by name."""
        hashes = out.write_weights(self.specs, tensors, self.shard_size)
        out.copy_side_files(opened.headers.path)
        out.write_json("config.json", dict(self.config))
        return hashes

    def report(
        self,
        opened: OpenModel,
        calibration: Mapping[str, Any] | None,
        hashes: Mapping[str, str],
        records: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The content of report.json. calibration: None where no text ran. records: the fields about what was done."""
        return {
            "llmcompress": __version__,
            "format": "dense",
            "source": source_record(opened.headers),
            "calibration": None if calibration is None else dict(calibration),
            "compute_dtype": opened.resources.dtype,
            "output_bytes": self.nbytes,
            **records,
            "linears": [],
            "ledger": opened.ledger.as_json(),
            "tensors": dict(hashes),
        }


def calibration_facts(tokens: Tensor) -> dict[str, Any]:
    """What a report says about the calibration windows."""
    return {"sha256": fingerprint(tokens), "samples": tokens.shape[0], "length": tokens.shape[1]}


def card(opened: OpenModel, calibration: Mapping[str, Any] | None, what: str, figures: Mapping[str, str]) -> str:
    """The model card of a model that has lost parts. calibration: None where no text ran. what: the method, in a few
    words."""
    asked = opened.text.source
    facts: dict[str, Any] = {
        "name": f"{model_title(opened.headers)} {what}",
        "format": "dense",
        "version": __version__,
        "change": "pruned",
        "config": opened.headers.config,
        "source_readme": beginning_of_readme(opened.headers.path / "README.md"),
        "methods": [what],
        "figures": figures,
        "calibration": calibration
        and {
            "source": asked if asked in ("default", "self") else "a text of the user's",
            "windows": f"{calibration['samples']} of {calibration['length']} tokens",
            "sha256 of the tokens": calibration["sha256"],
        },
    }
    return model_card(facts)
