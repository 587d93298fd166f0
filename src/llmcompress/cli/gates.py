"""Gates of a command, and what came of them as JUnit XML, which CI systems show as tests."""

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcompress.cli.log import log
from llmcompress.errors import GateError, LlmcompressError, PlanError, StoppedError, one_line

if TYPE_CHECKING:
    from llmcompress.validate.evaluate import Gate

State = Literal["passed", "failed", "error", "skipped"]


@dataclass(frozen=True)
class GateCase:
    """A test as CI systems show it. message: why it did not pass. detail: what was measured, and the bound."""

    name: str
    state: State
    message: str = ""
    detail: str = ""


class Gates:
    """The tests of a command, in order and by name: its own work first, then its gates."""

    def __init__(self, suite: str) -> None:
        self.suite = suite
        self.cases: dict[str, GateCase] = {suite: GateCase(suite, "passed")}

    def expect(self, names: Iterable[str]) -> None:
        """Name gates that are to be judged. A gate that is never judged counts as skipped."""
        for name in names:
            self.cases.setdefault(name, GateCase(name, "skipped", "not reached"))

    def judge(self, name: str, passed: bool, measured: object, bound: object, message: str) -> None:
        """Record whether a gate passed. message: why the gate failed, if it did."""
        detail = one_line(f"measured: {measured}") + "\n" + one_line(f"bound: {bound}")
        self.add(GateCase(name, "passed" if passed else "failed", "" if passed else message, detail))
        log.event("gate", name=name, passed=passed, measured=measured, bound=bound)

    def judge_figures(self, figures: Mapping[str, Any], conditions: "Mapping[str, Gate]") -> None:
        """Judge every condition on figures, by its text; then GateError for figures that are not finite, whether
        a condition speaks of them or not, or for the first condition that is true."""
        from llmcompress.validate.token_statistics import NOT_FINITE_HINT, not_finite

        broken = []
        if (said := not_finite(figures)) is not None:
            broken.append(said)
        for text, gate in conditions.items():
            message, bound = gate.broken(figures), f"not {gate.key} {gate.operator} {gate.bound:g}"
            failed = gate.fails(figures)
            self.judge(f"--fail-if {text}", not failed, figures[gate.key], bound, message)
            broken += [message] * failed
        if broken:
            raise GateError(broken[0], None if said is None else NOT_FINITE_HINT)

    def add(self, case: GateCase) -> None:
        self.cases[case.name] = case

    def ended(self, state: State, message: str) -> None:
        """Record how the command's own work ended, where it did not pass."""
        self.add(replace(self.cases[self.suite], state=state, message=message))


@contextmanager
def gated(suite: str, file: Path | None) -> Iterator[Gates]:
    """The gates of a command. They are written to `file`, if one is given, however the command ends.

    PlanError, before anything else, for a file that cannot be written.
    """
    if file is not None:
        _refuse_place(file)
    gates = Gates(suite)
    try:
        yield gates
    except GateError as error:
        if not any(case.state == "failed" for case in gates.cases.values()):
            gates.ended("failed", error.message)
        raise
    except StoppedError as error:
        gates.ended("skipped", error.message)
        raise
    except LlmcompressError as error:
        gates.ended("error", error.message)
        raise
    except BaseException as error:
        gates.ended("error", f"{type(error).__name__}: {error}")
        raise
    finally:
        if file is not None:
            write_junit(file, gates)


def write_junit(file: Path, gates: Gates) -> None:
    """The tests as JUnit XML, whole or not at all; what was there is replaced. Without times: the same every time."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    from llmcompress.store.unfinished import write_whole

    suite = TestSuite(f"llmcompress {gates.suite}")
    for case in gates.cases.values():
        item = TestCase(one_line(case.name), classname=f"llmcompress.{gates.suite}")
        results = {"failed": Failure, "error": Error, "skipped": Skipped}
        if case.state in results:
            item.result = [results[case.state](one_line(case.message), case.state)]
        if case.detail:
            item.system_out = case.detail
        suite.add_testcase(item)
    document = JUnitXml()
    document.add_testsuite(suite)
    text = io.BytesIO()
    document.write(text, pretty=True)
    write_whole(file, text.getvalue(), overwrite=True)


def _refuse_place(file: Path) -> None:
    from llmcompress.store.unfinished import refuse_unclaimable

    if not file.parent.is_dir():  # made here, it could be the output that a stopped run is to write later
        raise PlanError(f"--junit {file}: there is no directory {file.parent}", "make it first")
    refuse_unclaimable(file)
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
        raise PlanError(f"--junit {file} is not a file, so it is not replaced", "give another name")
