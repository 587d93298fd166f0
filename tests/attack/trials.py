"""Attacks on what lies between runs: commands that are killed, race, run out of disk, or find what was tampered with.

A trial is a function of a folder of its own and of the servers; it returns what was wrong, in words.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attempts import Attempt, Ended, Servers, Tally

Trial = Callable[[Path], list[str]]
ORDERLY = ("is being written by another run", "already exists", "is in use by another run", "exists")
SHORT = ["--samples", "2", "--length", "16"]


@dataclass(frozen=True)
class Command:
    """A command that writes `output`. words: relative to its folder. needs: what must lie there before."""

    name: str
    words: Sequence[str]
    output: str
    needs: Sequence[str] = ("model",)
    more: Sequence[str] = ()  # what it writes besides


COMMANDS = [
    Command("gptq", ["gptq", "model", "-o", "out", "--bits", "4", *SHORT], "out"),
    Command("stats", ["gptq", "model", "-o", "out", "--bits", "4", "--stats", "stats", *SHORT], "out", more=["stats"]),
    Command("awq", ["awq", "model", "-o", "out", *SHORT], "out"),
    Command("self", ["gptq", "model", "-o", "out", "--bits", "4", "--calibration", "self", *SHORT], "out"),
    Command("owl", ["wanda", "model", "-o", "out", "--sparsity", "0.5", "--allocation", "owl", *SHORT], "out"),
    Command("gguf", ["gguf", "model", "-o", "out.gguf", "--type", "Q4_0"], "out.gguf", more=["out.gguf.report.json"]),
    Command(
        "bpw",
        ["gguf", "model", "-o", "out.gguf", "--bpw", "6", "--losses", "losses.json", *SHORT],
        "out.gguf",
        more=["out.gguf.report.json", "losses.json"],
    ),
    Command("depth", ["depth", "model", "-o", "out", "--drop", "1", *SHORT], "out"),
    Command("depth kl", ["depth", "model", "-o", "out", "--drop", "1", "--by", "kl", *SHORT], "out"),
    Command("width", ["width", "model", "-o", "out", "--ratio", "0.5", *SHORT], "out"),
    Command("lora", ["lora", "model", "small", "-o", "out", "--rank", "4", *SHORT], "out", ("model", "small")),
    Command(
        "recover",
        ["recover", "small", "--ref", "model", "-o", "out", "--steps", "2", "--samples", "32", "--length", "16"],
        "out",
        ("model", "small"),
    ),
    Command(
        "draft",
        ["draft", "model", "-o", "out", "--steps", "2", "--samples", "32", "--written", "0", "--length", "16"],
        "out",
    ),
    Command("export", ["export", "kept", "--format", "gptq", "-o", "out"], "out", ("model", "kept")),
    Command("imatrix", ["imatrix", "model", "-o", "out", *SHORT], "out"),
    Command(
        "fit",
        ["fit", "model", "-o", "out", "--bpw", "5", "--bits", "4,8", "--sensitivity", "losses.json", *SHORT],
        "out",
        more=["losses.json"],
    ),
    Command("sweep", ["sweep", "rtn-w8", "model", "-o", "out", "--bits", "4,8"], "out"),
]


def digest(place: Path) -> dict[str, str]:
    """SHA-256 of every file of a directory, or of a file."""
    files = sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
    return {str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


class Ground:
    """Where trials are made. good: the digest of each command's output. seconds: what each takes undisturbed."""

    def __init__(self, folder: Path, model: Path, servers: Servers) -> None:
        self.folder, self.model, self.servers = folder, model, servers
        folder.mkdir()
        self.template = folder / "template"
        shutil.copytree(model, self.template / "model")
        self.run(self.template, ["rtn", "model", "-o", "small", "--bits", "4"])
        self.run(
            self.template, ["gptq", "model", "-o", "first", "--bits", "4", "--work", "kept", "--keep-work", *SHORT]
        )
        shutil.rmtree(self.template / "first")
        self.good: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, float] = {}

    def run(self, place: Path, words: Sequence[str], seconds: float = 100.0) -> Ended:
        """One command in a folder; it is killed after so many seconds."""
        return self.servers.run(Attempt("trial", words, seconds=seconds), place)

    def place(self, name: str, needs: Sequence[str] = ("model",)) -> Path:
        """A folder with what a command needs."""
        made = self.folder / name
        made.mkdir()
        for need in needs:
            (made / need).symlink_to(self.template / need) if need != "kept" else shutil.copytree(
                self.template / need, made / need
            )
        return made

    def measure(self, command: Command) -> None:
        """Run a command undisturbed."""
        place = self.place(f"good {command.name}", command.needs)
        ended = self.run(place, command.words)
        assert ended.code == 0, ended.err
        self.good[command.name], self.seconds[command.name] = digest(place / command.output), ended.seconds
        assert set(left(place, command)) == set(), left(place, command)
        shutil.rmtree(place)


def left(place: Path, command: Command) -> list[str]:
    """Names in the folder that neither the command needs nor writes."""
    known = {*command.needs, *command.more, command.output}
    return sorted(item.name for item in place.iterdir() if item.name not in known)


def orderly(ended: Ended) -> bool:
    """Whether a command was refused since another one has or had the place."""
    lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    return ended.code == 2 and len(lines) == 1 and any(said in lines[0] for said in ORDERLY)


def make(kind: str, trials: Mapping[str, Trial], ground: Ground, tally: Tally) -> None:
    """Make all trials of one class, two at a time; AssertionError naming every one in which something was wrong."""

    def one(named: tuple[str, Trial]) -> list[str]:
        name, trial = named
        place = ground.folder / f"{kind} {name}"
        wrongs = [f"{name}: {wrong}" for wrong in trial(place)]
        if not wrongs:
            shutil.rmtree(place, ignore_errors=True)
        return wrongs

    with ThreadPoolExecutor(ground.servers.count) as pool:
        found = [wrong for wrongs in pool.map(one, trials.items()) for wrong in wrongs]
    tally.attempts[kind] = tally.attempts.get(kind, 0) + len(trials)
    tally.broken.setdefault(kind, []).extend(found)
    assert not found, f"{len(found)} of {len(trials)}:\n" + "\n".join(found)
