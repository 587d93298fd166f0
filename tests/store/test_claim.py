"""One run at a time on one output: claims end with their process, name their holder, and are taken by one of many."""

import errno
import fcntl
import os
import platform
import shutil
import signal
import time

import pytest

from forked import ended, forked
from llmcompress.errors import LlmcompressError, PlanError, RunError
from llmcompress.store.claim import ClaimedError
from llmcompress.store.files import refuse_existing
from llmcompress.store.output import OutputDirectory
from llmcompress.store.unfinished import claimed, refuse_foreign, write_whole


def without_locks(monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture(params=["locks", "no locks"])
def system(request, monkeypatch):
    if request.param == "no locks":
        without_locks(monkeypatch)


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError


def test_a_claim_names_its_holder_and_leaves_nothing(system, tmp_path):
    out = tmp_path / "deep" / "er" / "out"
    with claimed(out):
        assert (tmp_path / "deep" / "er" / "out.partial").is_dir()
        with pytest.raises(ClaimedError) as caught:
            claimed(out)
        said = f"{out} is being written by another run (process {os.getpid()} on {platform.node()})"
        assert (caught.value.message, caught.value.exit_code) == (said, 2)
        with claimed(tmp_path / "deep" / "er" / "other"):
            pass
    assert list(tmp_path.iterdir()) == []
    with claimed(out):
        pass


def test_a_killed_process_blocks_nobody(system, tmp_path):
    out, ready = tmp_path / "out", tmp_path / "ready"

    def work():
        with OutputDirectory(out) as made:
            made.write_text("half", "of it")
            made.scratch()
            ready.touch()
            time.sleep(100)

    process = forked(work)
    until(ready.exists)
    with pytest.raises(ClaimedError, match=f"process {process} on "):
        OutputDirectory(out).__enter__()
    os.kill(process, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    assert (tmp_path / "out.partial" / "files" / "half").exists()
    with OutputDirectory(out) as made:
        made.write_text("config.json", "{}")
        made.commit()
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["config.json", "out", "ready"]


def test_without_locks_a_claim_of_another_machine_stays(monkeypatch, tmp_path):
    without_locks(monkeypatch)
    (tmp_path / "out.partial").mkdir()
    mark = tmp_path / "out.partial" / ".llmcompress-partial"
    for said in ("999999 elsewhere 0123", f"{os.getpid()} {platform.node()} 0123", "", "nonsense"):
        mark.write_text(said)
        with pytest.raises(ClaimedError):
            claimed(tmp_path / "out")
    mark.write_text(f"4194305 {platform.node()} 0123")  # no process has that number
    claimed(tmp_path / "out").remove()
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_has_the_claim_at_any_time(system, tmp_path):
    """Processes that claim, hold and give up one name as fast as they can; some are killed while they hold it."""

    def work():
        got = 0
        for _ in range(3000):
            try:
                with claimed(tmp_path / "out"):
                    os.close(os.open(tmp_path / "held", os.O_CREAT | os.O_EXCL))  # fails if two hold it
                    (tmp_path / "held").unlink()
                    got += 1
            except ClaimedError:
                os.sched_yield()
            if got == 40:
                return
        raise AssertionError(got)

    assert [ended(process) for process in [forked(work) for _ in range(4)]] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def plant_link(place, victim):
    place.symlink_to(victim)


def plant_dangling_link(place, victim):
    place.symlink_to(victim / "nowhere")


def plant_file(place, victim):
    place.write_text("mine")


def plant_foreign(place, victim):
    place.mkdir()
    (place / "letters").touch()


def plant_for_everybody(place, victim):
    place.mkdir()
    place.chmod(0o777)


def plant_of_another(place, victim):
    if os.geteuid():
        pytest.skip("only root can give files away")
    place.mkdir()
    (place / ".llmcompress-partial").touch()
    os.chown(place, 12345, 12345)


def plant_linked_mark(place, victim):
    place.mkdir()
    (place / ".llmcompress-partial").symlink_to(victim / "letters")


def plant_shared_mark(place, victim):
    place.mkdir()
    os.link(victim / "letters", place / ".llmcompress-partial")


def plant_pipe(place, victim):
    place.mkdir()
    os.mkfifo(place / ".llmcompress-partial")


PLANTED = [
    plant_link,
    plant_dangling_link,
    plant_file,
    plant_foreign,
    plant_for_everybody,
    plant_of_another,
    plant_linked_mark,
    plant_shared_mark,
    plant_pipe,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_is_refused_and_what_it_leads_to_stays(plant, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "letters").write_text("precious")
    plant(tmp_path / "out.partial", victim)
    with pytest.raises(PlanError):
        claimed(tmp_path / "out")
    with pytest.raises(PlanError):
        write_whole(tmp_path / "out", b"text", overwrite=True)
    with pytest.raises(PlanError), OutputDirectory(tmp_path / "out"):
        pass
    assert [file.name for file in victim.iterdir()] == ["letters"]
    assert (victim / "letters").read_text() == "precious"
    assert os.path.lexists(tmp_path / "out.partial")
    assert not (tmp_path / "out").exists()


def test_links_within_a_claim_of_a_killed_run_are_removed_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "letters").write_text("precious")
    claim = claimed(tmp_path / "out")
    for name in ("files", "replaced", "deleted", "scratch", "other"):
        (tmp_path / "out.partial" / name).symlink_to(victim)
    claim.made("inner").close()
    (tmp_path / "out.partial" / "inner" / "deep").symlink_to(victim)
    os.unlink("replaced", dir_fd=claim.fd)
    claim.close()
    with OutputDirectory(tmp_path / "out") as made:
        made.write_text("config.json", "{}")
        made.commit()
    assert (victim / "letters").read_text() == "precious"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "victim"]


def publish(out, meanwhile=lambda: None, **options):
    with OutputDirectory(out, **options) as made:
        made.write_text("config.json", "new")
        meanwhile()
        made.commit()


def a_model(path):
    path.mkdir()
    (path / "config.json").write_text("old")


def killed_while_it_overwrites(tmp_path, renames):
    """A run that was killed after so many of its renames: the output away, the new one in place, the old one named."""
    out = tmp_path / "out"
    a_model(out)
    made = OutputDirectory(out, overwrite=True).__enter__()
    made.write_text("config.json", "new")
    inside = tmp_path / "out.partial"
    moves = [(out, inside / "replaced"), (inside / "files", out), (inside / "replaced", inside / "deleted")]
    for one, other in moves[:renames]:
        one.rename(other)
    made.claim.close()
    return out


@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_an_overwrite_that_was_killed_anywhere_blocks_no_retry(tmp_path, renames):
    out = killed_while_it_overwrites(tmp_path, renames)
    with pytest.raises(PlanError, match="already exists"), OutputDirectory(out):
        pass
    assert (out / "config.json").read_text() == ("old" if renames < 2 else "new")
    with OutputDirectory(out, overwrite=True) as made:
        made.write_text("config.json", "newest")
        made.commit()
    assert (out / "config.json").read_text() == "newest"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_what_was_to_be_replaced_returns_if_the_new_output_cannot_appear(tmp_path, monkeypatch):
    a_model(tmp_path / "out")
    real = os.rename

    def rename(source, target, **where):
        if source == "files":
            raise OSError(errno.EIO, "no")
        return real(source, target, **where)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(RunError, match="cannot be written"):
        publish(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_claim_that_was_moved_away_publishes_nothing(tmp_path):
    def moved():
        (tmp_path / "out.partial").rename(tmp_path / "elsewhere")
        (tmp_path / "out.partial").mkdir()

    with pytest.raises(RunError):
        publish(tmp_path / "out", meanwhile=moved)
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "elsewhere")


def test_whole_files_appear_at_once_and_one_writer_has_them(tmp_path):
    file = tmp_path / "a.json"
    write_whole(file, b"one", overwrite=False)
    with pytest.raises(PlanError, match="already exists"):
        write_whole(file, b"two", overwrite=False)
    with claimed(file), pytest.raises(ClaimedError):
        write_whole(file, b"two", overwrite=True)
    write_whole(file, b"two", overwrite=True)
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("a.json", b"two")]
    (tmp_path / "link").symlink_to(file)
    write_whole(tmp_path / "link", b"three", overwrite=True)  # the link is replaced, not what it leads to
    assert file.read_bytes() == b"two"
    assert not (tmp_path / "link").is_symlink()


def test_a_place_where_a_disk_is_mounted_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(PlanError, match="a disk is mounted"):
        OutputDirectory(tmp_path / "out", overwrite=True)


def test_a_claim_that_finds_the_disk_full_leaves_nothing(system, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match="cannot be written"):
        claimed(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_planning_makes_nothing(tmp_path):
    OutputDirectory(tmp_path / "deep" / "out")
    refuse_foreign(tmp_path / "out")
    refuse_existing(tmp_path / "out", overwrite=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LlmcompressError):
        OutputDirectory(tmp_path / "..")
