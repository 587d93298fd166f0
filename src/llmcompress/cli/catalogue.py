"""What `list` shows: the registries, as rows of text."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import llmcompress.arch
import llmcompress.calib
from llmcompress.engine.targets.base import Target, targets
from llmcompress.engine.targets.facts import Fact
from llmcompress.engine.targets.grid_facts import Asymmetric, BitWidths, Groups
from llmcompress.errors import RecipeError
from llmcompress.formats.gguf.types import ALIASES, FILE_TYPES, tensor_type
from llmcompress.grids.grid_type import grid_types
from llmcompress.ledger import KINDS
from llmcompress.recipe import methods, stored_formats
from llmcompress.registry import discover, suggest

Kind = TypeVar("Kind", bound=Fact)
Listing = tuple[Sequence[str], Sequence[Sequence[str]]]


def catalogue(what: str) -> Listing:
    """Column names and rows of one registry."""
    if what not in _LISTS:
        raise RecipeError(f"there is no list of {what!r}", suggest(what, list(_LISTS)))
    return _LISTS[what]()


def _methods() -> Listing:
    return ("method", "what it does"), [(name, method.summary) for name, method in methods().items()]


def _formats() -> Listing:
    return ("format", "what it is"), [(name, item.summary) for name, item in stored_formats().items()]


def _archs() -> Listing:
    rows = [
        (
            name,
            ", ".join(spec.model_types),
            " | ".join(", ".join(item.path for item in stage) for stage in spec.stages()),
        )
        for name, spec in discover(llmcompress.arch, "ARCH").items()
    ]
    return ("architecture", "model types", "matrices in order of execution"), rows


def _sources() -> Listing:
    rows = [
        (name, (item.__doc__ or "").strip().splitlines()[0])
        for name, item in discover(llmcompress.calib, "SOURCE").items()
    ]
    return ("source", "what it reads"), rows


def _grids() -> Listing:
    return ("grid", "values"), [row for grid in grid_types().values() for row in grid.listed()]


def _types() -> Listing:
    rows = [
        (
            kind.name,
            kind.default,
            ", ".join(alias for alias, name in ALIASES.items() if name == kind.name),
            f"{8 * tensor_type(kind.default).block_bytes / tensor_type(kind.default).block:g}",
        )
        for kind in FILE_TYPES.values()
    ]
    return ("type", "of most matrices", "also called", "bits per weight of those"), rows


def _targets() -> Listing:
    rows = [
        (
            target.name,
            target.checked,
            name,
            _first(facts, BitWidths, lambda fact: ", ".join(map(str, fact.bits))),
            _first(facts, Asymmetric, lambda fact: ", ".join(map(str, fact.bits)) or "none"),
            _first(facts, Groups, Groups.__str__),
            "; ".join([fact.why for fact in facts] + [target.remark] * bool(target.remark and facts)),
        )
        for target in targets().values()
        for name, facts in _facts(target).items()
    ]
    return ("target", "as of", "format", "bits", "asymmetric", "groups", "facts"), rows


def _facts(target: Target) -> dict[str, tuple[Fact, ...]]:
    """The facts by format, those of every format at the first one."""
    return {name: (*target.always * (not row), *facts) for row, (name, facts) in enumerate(target.formats.items())}


def _first(facts: Sequence[Fact], kind: type[Kind], show: Callable[[Kind], str]) -> str:
    """What the first fact of a kind says, or that there is no limit."""
    return next((show(fact) for fact in facts if isinstance(fact, kind)), "any")


def _ledger() -> Listing:
    return ("kind", "when it is noted"), list(KINDS.items())


_LISTS: dict[str, Callable[[], Listing]] = {
    "methods": _methods,
    "formats": _formats,
    "grids": _grids,
    "archs": _archs,
    "sources": _sources,
    "types": _types,
    "targets": _targets,
    "ledger": _ledger,
}
