"""What lies between runs is tampered with: flipped bits, cut files and planted links, before the next command."""

import os
import random
import shutil
from functools import partial

import pytest
from attempts import LONG
from trials import SHORT, digest, make

from rounds import ROUNDS

pytestmark = [pytest.mark.slow, LONG]

FLIPS = 2 * ROUNDS  # of each kind of file
GPTQ = ["gptq", "model", "--bits", "4", *SHORT]
FIT = ["fit", "model", "--bpw", "5", "--bits", "4,8", *SHORT]
# what makes the files; the folder that holds them; the command that reads them
KEPT = {
    "work": ([*GPTQ, "-o", "out", "--deadline", "0"], "out.work", [*GPTQ, "-o", "out"]),
    "fit": ([*FIT, "-o", "out", "--deadline", "0"], "out.work", [*FIT, "-o", "out"]),
    "stats": ([*GPTQ, "-o", "first", "--stats", "stats"], "stats",
              ["gptq", "model", "--bits", "8", *SHORT, "-o", "out", "--stats", "stats"]),
    "export": ([*GPTQ, "-o", "first", "--work", "kept", "--keep-work"], "kept",
               ["export", "kept", "--format", "gptq", "-o", "out"]),
    "imatrix": (["imatrix", "model", "-o", "im/a", *SHORT], "im",
               ["gguf", "model", "--type", "Q4_K_M", "--imatrix", "im/a", "-o", "out"]),
    "legacy": (["imatrix", "model", "-o", "im/a", "--legacy", *SHORT], "im",
               ["gguf", "model", "--type", "Q4_K_M", "--imatrix", "im/a", "-o", "out"]),
    "losses": (
        ["gguf", "model", "--bpw", "6", "--losses", "kept/a.json", "-o", "first.gguf", *SHORT],
        "kept",
        ["gguf", "model", "--bpw", "5", "--losses", "kept/a.json", "-o", "out", *SHORT],
    ),
    "sensitivity": (
        [*FIT, "--sensitivity", "kept/a.json", "-o", "first"],
        "kept",
        ["fit", "model", "--bpw", "6", "--bits", "4,8", "--sensitivity", "kept/a.json", "-o", "out", *SHORT],
    ),
}  # fmt: skip


@pytest.fixture
def kept(ground):
    """kept(name): a folder with the files of a kind, and the digest of what the command makes of them."""

    def made(name):
        making, folder, words = KEPT[name]
        place = ground.place(f"made {name}")
        assert ground.run(place, making).code in (0, 75)
        shutil.copytree(place / folder, ground.folder / f"kept {name}")
        ended = ground.run(place, words)
        assert ended.code == 0, ended.err
        return ground.folder / f"kept {name}", digest(place / "out")

    return made


def one_line(ended):
    """What is wrong with how a command ended, whatever it found."""
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    if ended.code not in (0, 1, 2) or "Traceback" in ended.err or (ended.code and len(errors) != 1):
        return [f"exit code {ended.code}: {ended.err[-500:]}"]
    return []


def damaged(ground, name, source, good, damage, place):
    _, folder, words = KEPT[name]
    place = ground.place(place.name)
    shutil.copytree(source, place / folder)
    file, what = damage(place / folder)
    ended = ground.run(place, words)
    wrongs = one_line(ended)
    if ended.code and not wrongs and file.name not in ended.err:
        wrongs.append(f"{file.name} is not named: {ended.err[-300:]}")
    if ended.code == 0 and digest(place / "out") != good:
        wrongs.append(f"other bytes after {what} of {file.name}")
    return wrongs


def flip(noise, file):
    data = bytearray(file.read_bytes())
    bit = noise.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return file, f"a flip of bit {bit}"


def cut(noise, file):
    size = noise.randrange(file.stat().st_size)
    os.truncate(file, size)
    return file, f"a cut to {size} bytes"


@pytest.mark.parametrize("name", KEPT)
def test_damage(name, kept, ground, tally):
    source, good = kept(name)
    noise = random.Random(name)

    def damage(number, folder):
        files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
        file = files[number % len(files)]
        return (cut if number % 5 == 4 else flip)(noise, file)

    trials = {
        f"{name} {number}": partial(damaged, ground, name, source, good, partial(damage, number))
        for number in range(FLIPS)
    }
    make("damaged", trials, ground, tally)


WORK = [
    "plan.json", "plan.json.partial", "place.json", "place.json.partial", "section-00000.safetensors",
    "section-00001.safetensors", "section-00001.safetensors.partial", "hidden-compressed.partial",
    "hidden-original.partial", "hidden-compressed-00002-00000000.bin", "record-compressed-attn_in-in.bin",
    "record-compressed-attn_in-out.bin", "record-owl-0.bin", "tokens.safetensors", ".llmcompress-work",
]  # fmt: skip
PLACES = {
    "work": ["out.work", *(f"out.work/{name}" for name in WORK)],
    "stats": ["stats", "stats/ENTRY", "stats/ENTRY/about.json", "stats/ENTRY/layer-00000.safetensors",
              "stats/ENTRY/layer-00001.safetensors.partial", "stats/ENTRY/.llmcompress-stats"],
    "fit": ["out.work", "out.work/record-gradient.partial", "out.work/record-entering.partial",
            "out.work/section-00003.safetensors", "out.work/plan.json"],
}  # fmt: skip
BESIDE = ["out.partial", "out", "t.jsonl", "j.xml", "j.xml.partial"]


def to_a_file(place, victim):
    place.symlink_to(victim / "letters")


def to_a_folder(place, victim):
    place.symlink_to(victim)


def to_nothing(place, victim):
    place.symlink_to(victim / "nowhere")


def another_name(place, victim):
    os.link(victim / "letters", place)


def a_pipe(place, victim):
    os.mkfifo(place)


def planted(ground, name, source, target, plant, restart, place):
    _, folder, words = KEPT[name]
    place = ground.place(place.name)
    victim = place / "victim"
    victim.mkdir()
    (victim / "letters").write_text("precious")
    shutil.copytree(source, place / folder)
    (entry,) = [item.name for item in (place / "stats").iterdir()] if name == "stats" else [""]
    target = place / target.replace("ENTRY", entry)
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    plant(target, victim)
    more = ["--restart"] if restart else []
    beside = [] if name == "fit" else ["--timings", "t.jsonl"]
    ended = ground.run(place, [*words, *more, *beside, "--junit", "j.xml"])
    wrongs = one_line(ended)
    if sorted(item.name for item in victim.iterdir()) != ["letters"]:
        wrongs.append("something was written where a link leads")
    if (victim / "letters").read_text() != "precious":
        wrongs.append("the victim was written over")
    return wrongs


@pytest.mark.parametrize("name", PLACES)
def test_links(name, kept, ground, tally):
    source, _ = kept(name)
    kinds = [to_a_file, to_a_folder, to_nothing, another_name, a_pipe]
    trials = {
        f"{name} {target.replace('/', ' ')} {plant.__name__}": partial(
            planted, ground, name, source, target, plant, name == "work" and number % 2 == 1
        )
        for target in [*PLACES[name], *(BESIDE if name == "work" else [])]
        for number, plant in enumerate(kinds)
    }
    make("planted", trials, ground, tally)
