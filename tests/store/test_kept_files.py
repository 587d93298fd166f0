"""What a later start reads is what was written: flipped bits, cut and swapped files, and planted ones."""

import json
import os
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmcompress.engine.budget.losses_file import kept_losses, read_losses
from llmcompress.errors import LlmcompressError, PlanError, RunError
from llmcompress.formats.gguf.imatrix import Imatrix, ImatrixEntry
from llmcompress.formats.gguf.imatrix_file import read_imatrix, write_imatrix, write_legacy
from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerSpec, fit
from llmcompress.store.folder import Folder
from llmcompress.store.sealed import sealed, unsealed
from llmcompress.store.staging import Staging, kept_tokens, kept_work
from llmcompress.store.statistics import all_statistics, statistics_entry

FLIPS = 20  # of bits, in each file
SHAPE = (4, 3, 8)
IDENTITY = {"recipe": {"steps": [{"method": "gptq", "bits": 4}]}, "batch": 2}


def coded(seed=0):
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))
    grid = fit(weight, IntegerSpec(4, 8, True), clip="minmax", scale_dtype=torch.float16)
    return Coded(grid.encode(weight), grid)


def staged(path, identity=None):
    work = Staging(path, identity or IDENTITY)
    for number in range(2):
        work.write_section(
            number, {f"layers.{number}.a": coded(number)}, {"linears": [number / 3]}, {"in": torch.rand(8) + number}
        )
    work.keep_hidden(1, torch.float32, {"compressed": iter([torch.arange(96.0).view(SHAPE)])})
    work.keep_tokens(torch.arange(12).view(3, 4))
    work.remember_place(path, None, calibration={"sha256": "ab", "samples": 3})
    return work


def read_work(path):
    """All that a later start takes from a work directory, as plain data."""
    tokens = kept_tokens(path)
    plan, place = kept_work(path)
    work = Staging(path, IDENTITY)
    try:
        hidden = work.hidden({"compressed": SHAPE}, torch.float32, 2)
        return [
            work.resumed,
            None if tokens is None else tokens.tolist(),
            plan,
            place,
            [[coded.decode().tolist() for coded in work.read_section(number).values()] for number in range(2)],
            [work.records(number) for number in range(2)],
            [{name: part.tolist() for name, part in work.read_factors(number).items()} for number in range(2)],
            None if hidden is None else hidden.streams["compressed"].read(slice(0, 4)).tolist(),
        ]
    finally:
        work.close()


def make_work(folder):
    staged(folder / "work").close()
    return folder / "work", lambda: read_work(folder / "work")


def example():
    entries = {
        name: ImatrixEntry(np.arange(1, 17, dtype=np.float32).reshape(1, 16) * scale, np.array([512], np.float32))
        for name, scale in (("blk.0.ffn_up.weight", 1), ("blk.1.ffn_up.weight", 3))
    }
    return Imatrix(entries, ("text",), 1, 512)


def plain(imatrix):
    return [
        imatrix.datasets,
        {name: [item.sum2.tolist(), item.counts.tolist()] for name, item in imatrix.entries.items()},
        *(imatrix.chunk_count, imatrix.chunk_size),
    ]


def make_imatrix(folder, write=write_imatrix):
    write(folder / "im", example())
    return folder, lambda: plain(read_imatrix(folder / "im"))


def make_legacy(folder):
    return make_imatrix(folder, write_legacy)


def make_losses(folder):
    losses = {"a": {"int4": 0.25, "int8": 0.0625}, "b": {"int4": 1 / 3, "int8": 1e-9}}
    of, wanted = {"model": "m", "text": "t"}, {name: ["int4", "int8"] for name in losses}
    kept_losses(folder / "losses.json", of, wanted, lambda: losses)
    return folder, lambda: read_losses(folder / "losses.json", of, wanted)


def make_statistics(folder):
    entry = statistics_entry(folder / "stats", {"model": "m", "layers": 2, "steps": ["gptq"]})
    for number in range(2):
        entry.write(number, {"in/gram": torch.rand(36), "in/tokens": torch.tensor([7 + number])})
    entry.folder.close()

    def read():
        (kept,) = all_statistics(folder / "stats")
        cpu = torch.device("cpu")
        read = [kept.read(number, "in", cpu).gram for number in range(2)]
        return [kept.about, [(gram.tokens, gram.mean().tolist()) for gram in read]]

    return folder / "stats", read


KINDS = [make_work, make_imatrix, make_legacy, make_losses, make_statistics]


def files_in(folder):
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith(".")]


def outcome(read):
    """What is read, or the error in a word."""
    try:
        return read()
    except LlmcompressError as error:
        return type(error).__name__
    except (OSError, ValueError):  # of kept_work, which its callers put into words
        return "error"


@pytest.mark.parametrize("make", KINDS)
def test_a_flipped_bit_is_refused_or_changes_nothing(make, tmp_path):
    place, read = make(tmp_path)
    good, noise = read(), random.Random(0)
    refused = 0
    for file in files_in(place):
        data = file.read_bytes()
        for _ in range(FLIPS):
            bit = noise.randrange(8 * len(data))
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            found = outcome(read)
            if file.name.startswith("hidden-"):  # are computed again
                assert found[-1] is None
                assert found[:-1] == good[:-1]
            elif isinstance(found, str):
                refused += 1
            else:
                assert found == good, (file.name, bit)
            file.write_bytes(data)
    assert read() == good
    assert refused > FLIPS / 2


@pytest.mark.parametrize("make", KINDS)
def test_a_cut_file_is_refused(make, tmp_path):
    place, read = make(tmp_path)
    good = read()
    for file in files_in(place):
        data = file.read_bytes()
        for size in {0, 1, 7, len(data) // 2, len(data) - 9, len(data) - 1}:
            file.write_bytes(data[:size])
            found = outcome(read)
            if file.name.startswith("hidden-"):
                assert found[-1] is None
            elif found != good:  # what is cut may be white space, or a checksum whole
                assert isinstance(found, str), (file.name, size)
        file.write_bytes(data)


def test_sections_that_changed_places_are_refused(tmp_path):
    place, read = make_work(tmp_path)
    one, other = (place / f"section-0000{number}.safetensors" for number in range(2))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(RunError, match=r"section-00000\.safetensors is damaged"):
        read()


def test_files_of_another_run_are_not_used(tmp_path):
    place, read = make_work(tmp_path)
    good = read()
    staged(tmp_path / "other", {**IDENTITY, "batch": 3}).close()
    for file in files_in(tmp_path / "other"):
        kept = (place / file.name).read_bytes() if (place / file.name).exists() else None
        shutil.copy(file, place / file.name)
        found = outcome(read)
        if file.name.startswith(("hidden-", "tokens")):
            assert found == good
        elif file.name != "place.json":  # which is no part of the run
            assert isinstance(found, str), file.name
        if kept is not None:
            (place / file.name).write_bytes(kept)
        else:
            (place / file.name).unlink(missing_ok=True)


def test_statistics_that_changed_places_are_refused(tmp_path):
    place, read = make_statistics(tmp_path)
    one, other = sorted(place.rglob("layer-*"))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    with pytest.raises(RunError, match="layer-00000"):
        read()
    one.write_bytes(data)
    (entry,) = place.iterdir()
    entry.rename(place / "0123456789abcdef")
    with pytest.raises(PlanError, match=r"about\.json is damaged"):
        read()


def test_files_of_other_programs_carry_no_checksum(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "theirs", "")
    writer.kv_data[0].clear()
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, entry in example().entries.items():
        writer.add_tensor(f"{name}.in_sum2", entry.sum2)
        writer.add_tensor(f"{name}.counts", entry.counts[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert plain(read_imatrix(tmp_path / "theirs")) == plain(example())


def test_sealed_data_is_what_was_sealed():
    data = {"a": [1, 2.5, None], "b": {"3": "x"}}
    assert unsealed(sealed(data)) == data
    assert unsealed(sealed({"a": {3: 1}})) == {"a": {"3": 1}}
    for wrong in (b"", b"[]", b"{}", b'{"a": 1}', b"[" * 100_000, sealed(data).replace(b"2.5", b"2.6"), b"\xff"):
        with pytest.raises(ValueError, match=r".*"):
            unsealed(wrong)


# -- planted files --------------------------------------------------------------------------------------------------


NAMES = [
    "plan.json",
    "plan.json.partial",
    "place.json",
    "place.json.partial",
    "tokens.safetensors",
    "tokens.safetensors.partial",
    "section-00000.safetensors",
    "section-00002.safetensors.partial",
    "hidden-compressed.partial",
    "hidden-compressed-00000-00000000.bin",
    "record-compressed-in-out.bin",
    "record-gradient.partial",
    ".llmcompress-work",
]


def link(place, victim):
    place.symlink_to(victim)


def dangling(place, victim):
    place.symlink_to(victim.with_name("nowhere"))


def another_name(place, victim):
    os.link(victim, place)


def pipe(place, victim):
    os.mkfifo(place)


def of_another(place, victim):
    if os.geteuid():
        pytest.skip("only root can give files away")
    place.write_bytes(victim.read_bytes())
    os.chown(place, 12345, 12345)


PLANTS = [link, dangling, another_name, pipe, of_another]
PLANTED = [(NAMES[0], plant) for plant in PLANTS]
PLANTED += [(name, PLANTS[number % len(PLANTS)]) for number, name in enumerate(NAMES[1:], 1)]


@pytest.mark.parametrize(("name", "plant"), PLANTED)
def test_planted_files_are_refused_before_anything_is_done(plant, name, tmp_path):
    work, victim = tmp_path / "work", tmp_path / "victim"
    victim.write_text("precious")
    staged(work).close()
    (work / name).unlink(missing_ok=True)
    plant(work / name, victim)
    for restart in (False, True):
        with pytest.raises(PlanError, match=name.replace(".", r"\.")):
            Staging(work, IDENTITY, restart=restart)
    assert victim.read_text() == "precious"
    assert not victim.with_name("nowhere").exists()


@pytest.mark.parametrize("name", NAMES[:-1])
def test_what_is_planted_while_a_run_works_is_never_followed(name, tmp_path):
    work, victim = tmp_path / "work", tmp_path / "victim"
    victim.write_text("precious")
    run = Staging(work, IDENTITY)
    (work / name).unlink(missing_ok=True)
    (work / name).symlink_to(victim)

    def all_of_it():
        for number in range(3):
            run.write_section(number, {"a": coded()}, {})
            run.read_section(number)
        run.keep_hidden(0, torch.float32, {"compressed": iter([torch.zeros(SHAPE)])})
        run.hidden({"compressed": SHAPE}, torch.float32, 2)
        run.keep_tokens(torch.zeros(2, 2, dtype=torch.int64))
        run.remember_place(work, None)

    outcome(all_of_it)
    run.remove()
    assert victim.read_text() == "precious"
    assert [file.name for file in tmp_path.iterdir()] == ["victim"]


def test_a_work_directory_is_ones_own(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PlanError, match="is a link"):
        Staging(tmp_path / "link", IDENTITY)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    with pytest.raises(PlanError, match="everybody may write"):
        Staging(tmp_path / "open", IDENTITY)
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", 12345, 12345)
        with pytest.raises(PlanError, match="belongs to another user"):
            Staging(tmp_path / "real", IDENTITY)
        with pytest.raises(PlanError, match="belongs to another user"):
            all_statistics(tmp_path / "real")
    assert list((tmp_path / "real").iterdir()) == []


def test_a_folder_that_is_moved_away_is_still_the_one_written_to(tmp_path):
    run = Staging(tmp_path / "work", IDENTITY)
    (tmp_path / "work").rename(tmp_path / "moved")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "place.json").write_text("precious")
    (tmp_path / "work").symlink_to(tmp_path / "victim")
    run.remember_place(tmp_path, None)
    assert (tmp_path / "victim" / "place.json").read_text() == "precious"
    assert (tmp_path / "moved" / "place.json").exists()


def test_the_owner_that_a_file_system_gives_to_all_is_no_other_user(tmp_path, monkeypatch):
    """As where a server maps every user to one: what this process makes has the owner of the directory."""
    real = os.fstat

    def mapped(descriptor):
        found = real(descriptor)
        return SimpleNamespace(
            **{name: getattr(found, name) for name in dir(found) if name.startswith("st_")} | {"st_uid": 65534}
        )

    monkeypatch.setattr(os, "fstat", mapped)
    Folder(tmp_path).close()


# -- other recipes --------------------------------------------------------------------------------------------------


def test_another_run_is_told_by_the_keys_that_differ(tmp_path):
    staged(tmp_path / "work").close()
    other = {"recipe": {"steps": [{"method": "gptq", "bits": 3}, {"method": "rtn"}]}, "batch": 4}
    with pytest.raises(PlanError) as caught:
        Staging(tmp_path / "work", other)
    assert caught.value.message == (
        f"{tmp_path / 'work'} holds another run: recipe.steps[0].bits was 4, now 3, batch was 2, now 4, "
        "recipe.steps[1].method was not there, now rtn"
    )
    assert "--restart" in caught.value.hint
    many = {**IDENTITY, "grids": {str(number): "x" * 150 for number in range(20)}}
    with pytest.raises(PlanError) as caught:
        Staging(tmp_path / "work", many)
    assert caught.value.message.endswith(
        "holds another run: grids.0, grids.1, grids.2, grids.3, grids.4, grids.5 and 14 more"
    )


@pytest.mark.parametrize("identity", [IDENTITY, {"other": 1}])
def test_restart_throws_away_what_runs_made_and_nothing_else(identity, tmp_path):
    work = tmp_path / "work"
    staged(work).close()
    (work / "letters.partial").write_text("mine")
    (work / "section-x.safetensors").write_text("mine")
    run = Staging(work, identity, restart=True)
    assert not run.resumed
    assert run.missing(2) == [0, 1]
    assert sorted(file.name for file in work.iterdir()) == [
        ".llmcompress-work",
        "letters.partial",
        "plan.json",
        "section-x.safetensors",
    ]
    run.remove()
    assert sorted(file.name for file in work.iterdir()) == [
        ".llmcompress-work",
        "letters.partial",
        "section-x.safetensors",
    ]
    run.close()
    assert not Staging(work, IDENTITY).resumed  # which blocks no later run


def test_restart_does_not_take_work_from_a_run_that_lives(tmp_path):
    run = staged(tmp_path / "work")
    with pytest.raises(PlanError, match="is in use by another run"):
        Staging(tmp_path / "work", IDENTITY, restart=True)
    assert run.missing(2) == []


def test_a_damaged_plan_is_thrown_away_by_restart(tmp_path):
    staged(tmp_path / "work").close()
    (tmp_path / "work" / "plan.json").write_text(json.dumps(IDENTITY))
    with pytest.raises(PlanError, match=r"plan\.json is damaged"):
        Staging(tmp_path / "work", IDENTITY)
    assert not Staging(tmp_path / "work", IDENTITY, restart=True).resumed
