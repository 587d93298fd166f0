"""Commands that are killed at random times, race for one output, or run out of disk: what is there is whole, and the
same command again gives the same bytes and leaves nothing."""

import os
import random
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from attempts import LONG
from trials import COMMANDS, SHORT, digest, left, make, orderly

from rounds import ROUNDS

pytestmark = [pytest.mark.slow, LONG]

KILLS = ROUNDS  # of every command, and as many where it overwrites
RACES = 20 * ROUNDS


def killed(ground, command, after, old, place):
    """Kill a command, then run it again. old: whether it overwrites an output that is there."""
    place = ground.place(place.name, command.needs)
    words = [*command.words, "--overwrite"] if old else command.words
    if old:
        first = ground.run(place, command.words)
        if first.code:
            return [f"the first run ends with {first.code}: {first.err}"]
        for name in command.more if command.name in ("bpw", "fit") else ():
            (place / name).unlink(missing_ok=True)
    ground.run(place, words, after)
    again = ground.run(place, words)
    wrongs = []
    if again.code and not (orderly(again) and not old):
        return [f"after a kill at {after:.2f} s the same command ends with {again.code}: {again.err[-500:]}"]
    if digest(place / command.output) != ground.good[command.name]:
        wrongs.append(f"other bytes after a kill at {after:.2f} s")
    if again.code == 0 and left(place, command):
        wrongs.append(f"left after a kill at {after:.2f} s: {left(place, command)}")
    return wrongs


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_kills(command, ground, tally):
    ground.measure(command)
    noise = random.Random(command.name)
    trials = {}
    for old in (False, True):
        for number in range(KILLS):
            # a third of them late, while the output is being written and published
            share = noise.uniform(0.0, 1.0) if number % 3 else noise.uniform(0.8, 1.05)
            after = max(0.01, share * ground.seconds[command.name])
            trials[f"{command.name} {number} {old}"] = partial(killed, ground, command, after, old)
    make("killed", trials, ground, tally)


RACERS = {
    "rtn": (["rtn", "../model", "-o", "../out", "--bits", "4"], "out"),
    "gptq": (["gptq", "../model", "-o", "../out", "--bits", "4", *SHORT], "out"),
    "gguf": (["gguf", "../model", "-o", "../out.gguf", "--type", "Q4_0"], "out.gguf"),
    "width": (["width", "../model", "-o", "../out", "--ratio", "0.5", *SHORT], "out"),
    "depth": (["depth", "../model", "-o", "../out", "--drop", "1", *SHORT], "out"),
    "imatrix": (["imatrix", "../model", "-o", "../out", *SHORT], "out"),
    "sweep": (["sweep", "rtn-w8", "../model", "-o", "../out", "--bits", "4,8"], "out"),
    "fit": (["fit", "../model", "-o", "../out", "--bpw", "5", "--bits", "4,8", *SHORT], "out"),
}
WORKS = {"work": ["../work", "../work"], "works": ["../a", "../b"]}


def raced(ground, good, words, output, works, delay, place):
    """Two of one command at the same time, for one output; a sweep that comes late finds its runs finished."""
    place = ground.place(place.name)
    ended = {}

    def racer(number):
        (place / str(number)).mkdir()
        time.sleep(delay * number)
        work = ["--work", works[number]] if works else []
        ended[number] = ground.run(place / str(number), [*words, *work])

    threads = [threading.Thread(target=racer, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrongs = [f"{one.code}: {one.err[-300:]}" for one in ended.values() if one.code and not orderly(one)]
    if all(one.code for one in ended.values()):
        wrongs.append("both were refused")
    if all(one.code == 0 for one in ended.values()) and not {"--overwrite", "sweep"} & set(words):
        wrongs.append("both won")
    if not wrongs and digest(place / output) != good:
        wrongs.append("other bytes")
    rest = {item.name for item in place.iterdir()} - {"model", "0", "1", output, f"{output}.report.json"}
    return [*wrongs, *([f"left: {sorted(rest)}"] if rest else [])]


def test_races(ground, tally):
    noise, good, seconds = random.Random(0), {}, {}
    for name, (words, output) in RACERS.items():
        place = ground.place(f"good {name}")
        (place / "0").mkdir()
        ended = ground.run(place / "0", words)
        assert ended.code == 0, ended.err
        good[name], seconds[name] = digest(place / output), ended.seconds
    names, number = list(RACERS), 0
    while number < RACES:
        for name in names:
            words, output = RACERS[name]
            works = list(WORKS.values())[number % 2] if name in ("rtn", "gptq", "gguf", "fit") else None
            over = ["--overwrite"] if number % 3 == 0 else []
            delay = noise.choice([0.0, 0.001, 0.01, noise.uniform(0, seconds[name])])
            trial = partial(raced, ground, good[name], [*words, *over], output, works, delay)
            # one pair at a time, as it takes both servers
            with_one = {f"{number} {name}": trial}
            make_alone(with_one, ground, tally)
            number += 1


def make_alone(trials, ground, tally):
    for name, trial in trials.items():
        wrongs = [f"{name}: {wrong}" for wrong in trial(ground.folder / f"race {name}")]
        tally.attempts["raced"] = tally.attempts.get("raced", 0) + 1
        tally.broken.setdefault("raced", []).extend(wrongs)
        assert not wrongs, "\n".join(wrongs)
        shutil.rmtree(ground.folder / f"race {name}")


# -- full disks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """disk(bytes): a small file system of that size, or the one there is with another size."""
    place = tmp_path / "disk"
    place.mkdir()

    def sized(nbytes):
        again = ["-o", f"remount,size={nbytes}"] if os.path.ismount(place) else ["-o", f"size={nbytes}"]
        done = subprocess.run(["mount", "-t", "tmpfs", *again, "none", str(place)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("only root may mount a small disk, where it may")
        return place

    yield sized
    if os.path.ismount(place):
        subprocess.run(["umount", "-l", str(place)], check=True)


FULL = {
    "output": ["gptq", "model", "-o", "DISK/out", "--work", "work", "--bits", "4", *SHORT],
    "work": ["gptq", "model", "-o", "out", "--work", "DISK/work", "--bits", "4", *SHORT],
    "stats": ["gptq", "model", "-o", "out", "--stats", "DISK/stats", "--bits", "4", *SHORT],
    "gguf": ["gguf", "model", "-o", "DISK/out.gguf", "--work", "work", "--type", "Q4_0"],
    "width": ["width", "model", "-o", "DISK/out", "--ratio", "0.5", *SHORT],
    "imatrix": ["imatrix", "model", "-o", "DISK/out", *SHORT],
}


@pytest.mark.parametrize("name", FULL)
def test_full_disks(name, ground, disk, tally):
    """A disk that is filled at some place of a run, which plan could not foresee, and then has room again."""
    words = FULL[name]
    big, place = 60_000_000, ground.place("full")
    root = disk(big)
    words = [word.replace("DISK", str(root)) for word in words]
    output = place / words[words.index("-o") + 1]
    assert ground.run(place, words).code == 0
    good = digest(output)
    wrongs, failed = [], 0
    noise = random.Random(name)
    for number in range(12):
        for item in [*root.iterdir(), *(item for item in place.iterdir() if item.name != "model")]:
            shutil.rmtree(item) if item.is_dir() else item.unlink()
        free = noise.choice([4096, 50_000, 200_000, 500_000, 1_000_000, 1_500_000, noise.randrange(3_000_000)])
        stop = threading.Event()

        def fill(free=free, stop=stop):
            """Leave so many bytes free beyond what the command has written when it begins to write."""
            until = time.monotonic() + 60
            while not any(root.iterdir()) and not stop.is_set() and time.monotonic() < until:
                time.sleep(0.001)
            with suppress(OSError), (root / "filler").open("wb") as handle:
                handle.write(b"x" * max(0, shutil.disk_usage(root).free - free))

        filler = threading.Thread(target=fill)
        filler.start()
        ended = ground.run(place, words)
        stop.set()
        filler.join()
        failed += bool(ended.code)
        if ended.code not in (0, 1, 2) or "Traceback" in ended.err or (ended.code and ended.err.count("error: ") != 1):
            wrongs.append(f"{number}, {free} bytes free: {ended.code}: {ended.err[-400:]}")
        if ended.code and output.exists():
            wrongs.append(f"{number}: an output in spite of exit code {ended.code}")
        (root / "filler").unlink(missing_ok=True)
        again = ended if ended.code == 0 else ground.run(place, words)
        if again.code or digest(output) != good:
            wrongs.append(f"{number}, {free} bytes free, again: {again.code}: {again.err[-400:]}")
        rest = [
            item.name
            for item in root.iterdir()
            if item.name not in (output.name, "stats", f"{output.name}.report.json")
        ]
        wrongs += [f"{number}: left {rest}"] if rest else []
    tally.attempts["full disk"] = tally.attempts.get("full disk", 0) + 12
    tally.broken.setdefault("full disk", []).extend(wrongs)
    assert not wrongs, "\n".join(wrongs)
    assert failed
