"""What a runtime is, and where all of them are found. To add one, add a file to `runtimes`; nothing else knows them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcompress.engine.targets import runtimes
from llmcompress.engine.targets.facts import Fact
from llmcompress.registry import discover


@dataclass(frozen=True)
class Target:
    """One runtime: what its loader and kernels accept. A file of `runtimes` offers one as `TARGET`.

    name: as on the command line. title: as in a sentence. checked: the version the facts are of. place: where it stands
    among others in lists and messages.
    formats: what it reads, the best first, each with the facts that limit it. always: facts that limit every format.
    borrowed: model types that it runs by transformers' own classes. tensor_parallel: matrices are split over devices.
    fuses: q, k, v and gate, up run as one linear each. decodes: codes are read only to be decoded, so that nothing is
    lost by writing decoded weights. further: it loads layers after the last. remark: what a user of it should know.
    unasked: whether the ledger says that it does not load a result where no target is named.
    """

    name: str
    title: str
    checked: str
    place: int
    formats: Mapping[str, tuple[Fact, ...]] = field(default_factory=dict)
    always: tuple[Fact, ...] = ()
    borrowed: tuple[str, ...] = ()
    tensor_parallel: bool = False
    fuses: bool = False
    decodes: bool = False
    further: bool = True
    remark: str = ""
    unasked: bool = True


def targets() -> dict[str, Target]:
    """All runtimes by name, in the order of lists and messages."""
    found: dict[str, Target] = discover(runtimes, "TARGET")
    return dict(sorted(found.items(), key=lambda item: item[1].place))
