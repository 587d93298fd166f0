"""The attack as a fixture, and its table of attempts at the end."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from attempts import Attempt, Servers, Tally
from attempts import attack as make
from trials import Ground

_TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Tally()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    started = Servers(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    yield started
    started.close()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """The counts of this session."""
    return request.config.stash[_TALLY]


@pytest.fixture
def attack(tmp_path: Path, tally: Tally, servers: Servers) -> Callable[[str, Sequence[Attempt]], None]:
    """attack(class, attempts): make them all; the test fails if one of them breaks a promise."""
    return partial(make, folder=tmp_path / "attempts", tally=tally, servers=servers)


@pytest.fixture
def ground(tmp_path: Path, servers: Servers, tiny_model_dir: Path) -> Ground:
    return Ground(tmp_path / "ground", tiny_model_dir, servers)


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    tally = config.stash[_TALLY]
    if tally.attempts:
        terminalreporter.section("attempts")
        for kind, count in tally.attempts.items():
            terminalreporter.line(f"{kind:<32} {count:>6} attempts {len(tally.broken[kind]):>5} broken promises")
        total, broken = sum(tally.attempts.values()), sum(map(len, tally.broken.values()))
        terminalreporter.line(f"{'all':<32} {total:>6} attempts {broken:>5} broken promises")
    return (yield)
