"""What a command that compresses is asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcompress.api.recipes import method_recipe
from llmcompress.cli import options as flags
from llmcompress.cli.gates import Gates
from llmcompress.engine.plan.run_options import Options
from llmcompress.ledger import LedgerEntry
from llmcompress.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """A recipe to be carried out on a model. notes: on how the recipe came about, for the ledger."""

    recipe: Recipe
    model: Path
    options: Options
    notes: tuple[LedgerEntry, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe | str, values: Mapping[str, Any]) -> "Job":
        """The job of a recipe, or of a method and its options, with the values of a command's options."""
        if isinstance(recipe, str):
            recipe = method_recipe(recipe, flags.recipe_settings(values))
        return cls(recipe, values["model"], flags.run_options(values))


@dataclass(frozen=True)
class Execution:
    """How a command carries its jobs out, and what it tells of them; see the options of these names."""

    gates: Gates
    strict: tuple[str, ...]
    deadline: float | None
    timings: Path | None
    dry_run: bool
    print_recipe: bool
    json: bool
    quiet: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Execution":
        return cls(
            values["gates"],
            tuple(values["strict"] or ()),
            values["deadline"],
            values["timings"],
            values["dry_run"],
            values.get("print_recipe", False),
            values["json_"],
            values["quiet"],
        )
