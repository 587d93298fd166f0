"""Several processes share a run, as torchrun starts them: the same bytes as one, and no hanging when one dies.

Ranks are processes of their own, forked from one that has its imports done; one test starts torchrun itself. The
connections they open are the library's own, to this machine.
"""

import hashlib
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore

from forkserver import PROCESSES
from llmcompress.engine.process import ranks
from llmcompress.errors import PlanError, RunError
from madetokenizers import byte_level, save

rendezvous_module = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name

SMALL = ["--samples", 6, "--length", 32, "--batch", 2, "--threads", 1]
GPTQ = ["--group-size", 32, *SMALL]
MANY = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 288}


class Started:
    """A command in `size` processes; with one, as without torchrun."""

    def __init__(self, folder, arguments, size=2, each=()):
        """each: further arguments of every rank, where ranks have other ones."""
        self.logs = [folder / f"log-{time.monotonic_ns()}-{rank}" for rank in range(size)]
        places = [{}] if size == 1 else environments(size)
        self.processes = [
            PROCESSES.Process(target=_main, args=(list(map(str, (*arguments, *more))), log, place))
            for log, place, more in zip(self.logs, places, each or [()] * size, strict=True)
        ]
        for process in self.processes:
            process.start()

    def end(self, timeout=120):
        """The exit codes."""
        for process in self.processes:
            process.join(timeout)
            assert process.exitcode is not None, "a rank hangs"
        return [process.exitcode for process in self.processes]

    @property
    def said(self):
        """What each wrote to stdout and stderr."""
        return [log.read_text() for log in self.logs]


def environments(size):
    """What torchrun sets for each rank."""
    port = TCPStore("127.0.0.1", 0, 1, True).port
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _main(arguments, log, environment):
    """In the process: `python -m llmcompress ARGUMENTS`."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv = ["llmcompress", *arguments]
    runpy.run_module("llmcompress", run_name="__main__")


def contents(place):
    """Hashes of all files by name."""
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def same_as_alone(tmp_path, arguments, size=2, name="out"):
    """Run a command alone and shared; the outputs, which must be the same to the byte."""
    for count, place in ((1, tmp_path / "alone"), (size, tmp_path / "shared")):
        place.mkdir()
        started = Started(place, [*arguments, "-o", place / name], count)
        assert started.end() == [0] * count, started.said
        assert not any(started.said[1:]), "only the first rank speaks"
    assert contents(tmp_path / "shared" / name) == contents(tmp_path / "alone" / name)
    assert not list((tmp_path / "shared").glob("*.work*"))
    return tmp_path / "shared" / name


# -- the same bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_dense_model_has_the_same_bytes(size, shallow_model_dir, tmp_path):
    same_as_alone(tmp_path, ["gptq", shallow_model_dir, *GPTQ], size)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_experts_have_the_same_bytes_and_notes(family, random_model_dir, tiny_ids, tmp_path):
    out = same_as_alone(tmp_path, ["gptq", random_model_dir(family), "--calibration", tiny_ids, *GPTQ])
    kinds = {entry["kind"] for entry in json.loads((out / "report.json").read_text())["ledger"]}
    assert "starved_expert" in kinds


CASES = {
    "awq": ["awq", *GPTQ],
    "awq by blocks": ["{method: awq, objective: block}, {method: smoothattention}, {method: rtn, group_size: 32}"],
    "smoothquant": ["smoothquant", *SMALL],
    "fixed inputs and caches": ["fp8", "--activations", "fp8-tensor", "--kv-cache", "fp8", *SMALL],
    "outliers": ["int8", "--outliers", "topk", *SMALL],
    "codebooks": ["gptq", "--type", "codebook", "--format", "codebook", *SMALL],
    "double quantisation": ["nf4", "--calibration", "default", *SMALL],
    "no text": ["rtn", "--group-size", 32],
    "sampled text": ["gptq", "--calibration", "self", *GPTQ],
    "another order of groups": ["gptq", "--actorder", "group", "--format", "gptq", *GPTQ],
    "measured inputs": ["gptq", "--activations", "int8-tensor", "--activation-clip", "percentile", *GPTQ],
    "pruned": ["sparsegpt", "--pattern", "2:4", *SMALL],
    "pruned by outliers": ["wanda", "--sparsity", 0.5, "--allocation", "owl", "--refit", 2, *SMALL],
    "pruned and rounded": ["{method: sparsegpt, pattern: '2:4', joint: true}, {method: gptq, group_size: 32}"],
    "weighed tokens": ["gptq", "--guided", *GPTQ],
    "recovered": ["gptq", "--recover", "block", *GPTQ, "--samples", 32],
    "an original stream of one batch": ["gptq", "--qep-samples", 2, *GPTQ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_statistic_and_code_has_the_same_bytes(case, shallow_model_dir, tmp_path):
    command, *options = CASES[case]
    if options:
        arguments = [command, shallow_model_dir, *options]
    else:  # steps of a recipe
        (tmp_path / "recipe.yaml").write_text(f"calibration: {{samples: 6, length: 32}}\nsteps: [{command}]\n")
        arguments = ["run", tmp_path / "recipe.yaml", shallow_model_dir, "--batch", 2]
    same_as_alone(tmp_path, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["fp8", "--activations", "fp8-tensor", *SMALL], ["awq", *GPTQ]], ids=["fp8", "awq"]
)
def test_ranges_and_factors_of_experts_have_the_same_bytes(options, random_model_dir, tiny_ids, tmp_path):
    command, *rest = options
    same_as_alone(tmp_path, [command, random_model_dir("qwen3_moe"), "--calibration", tiny_ids, *rest])


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--calibration", "default", *SMALL], ["--threads", 1]], ids=["text", "no text"])
def test_gguf_files_have_the_same_bytes(options, shallow_model_dir, tmp_path):
    same_as_alone(tmp_path, ["gguf", shallow_model_dir, "--type", "Q4_0", *options], name="out.gguf")


@pytest.mark.slow
def test_threads_and_ranks_together_have_the_same_bytes(shallow_model_dir, tmp_path):
    arguments = ["gptq", shallow_model_dir, *GPTQ[:-1]]
    for count, threads in ((1, 1), (2, 2)):
        place = tmp_path / f"out-{count}"
        started = Started(tmp_path, [*arguments, threads, "-o", place], count)
        assert started.end() == [0] * count, started.said
    assert contents(tmp_path / "out-1") == contents(tmp_path / "out-2")


@pytest.mark.slow
def test_ranks_may_have_other_numbers_of_threads(random_model_dir, tmp_path):
    """As on machines with other numbers of cores: they share experts alike."""
    model = save(byte_level(), shutil.copytree(random_model_dir("qwen3_moe", **MANY), tmp_path / "model"))
    for count, each in ((1, [["--threads", 1]]), (2, [["--threads", 2], ["--threads", 1]])):
        arguments = ["gptq", model, "--group-size", 16, "--samples", 4, "--length", 16, "-o", tmp_path / f"out-{count}"]
        started = Started(tmp_path, [*arguments, "--batch", 1], count, each)
        assert started.end() == [0] * count, started.said
    assert contents(tmp_path / "out-1") == contents(tmp_path / "out-2")


@pytest.mark.slow
def test_kept_statistics_are_those_of_one_process(shallow_model_dir, tmp_path):
    for size in (1, 2):
        store = ["--stats", tmp_path / f"store-{size}"]
        for name, command in (("first", GPTQ), ("second", [*GPTQ, "--bits", 8])):  # the second goes by the first's
            started = Started(
                tmp_path, ["gptq", shallow_model_dir, *command, *store, "-o", tmp_path / name / str(size)], size
            )
            assert started.end() == [0] * size, started.said
    for name in ("first/1", "second/1", "store-1"):
        assert contents(tmp_path / name) == contents(tmp_path / name.replace("1", "2"))


# -- a rank that dies ---------------------------------------------------------------------------------------------


def kill_once_staged(work, victim, timeout=60):
    """SIGKILL to the process that `victim` names, once the first section is there."""
    until = time.monotonic() + timeout
    while not (work / "section-00000.safetensors").exists():
        assert time.monotonic() < until, "no section"
        time.sleep(0.005)
    os.kill(victim(), signal.SIGKILL)


@pytest.mark.parametrize(("victim", "again"), [(0, 1), (1, 3)])
def test_a_killed_rank_ends_the_others_and_the_next_start_goes_on(victim, again, tiny_model_dir, tmp_path):
    arguments = ["gptq", tiny_model_dir, *GPTQ, "-o"]
    work = tmp_path / "out.work"
    started = Started(tmp_path, [*arguments, tmp_path / "out", "--work", work])
    kill_once_staged(work, lambda: started.processes[victim].pid)
    begin = time.monotonic()
    codes = started.end(60)
    assert time.monotonic() - begin < 30
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    said = started.said[1 - victim]
    assert "error: " in said
    assert "another rank has ended or does not answer" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    before = (work / "section-00000.safetensors").stat().st_mtime_ns

    second = Started(tmp_path, [*arguments, tmp_path / "out", "--work", work, "--keep-work"], again)
    assert second.end() == [0] * again, second.said
    assert "were finished before; going on" in second.said[0]
    assert (work / "section-00000.safetensors").stat().st_mtime_ns == before
    whole = Started(tmp_path, [*arguments, tmp_path / "whole"], 1)
    assert whole.end() == [0], whole.said
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def torchrun(*arguments, size=2):
    """The command line that starts ranks as users do."""
    port = TCPStore("127.0.0.1", 0, 1, True).port
    place = ["--nnodes", 1, "--nproc-per-node", size, "--master-addr", "127.0.0.1", "--master-port", port]
    return [str(item) for item in (sys.executable, "-m", "torch.distributed.run", *place, "-m", *arguments)]


@pytest.mark.slow
def test_torchrun_starts_a_run_of_the_same_bytes(tiny_model_dir, tmp_path):
    command = ["llmcompress", "gptq", tiny_model_dir, *GPTQ, "-o", tmp_path / "out", "--json"]
    done = subprocess.run(torchrun(*command), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == str(tmp_path / "out")
    alone = Started(tmp_path, ["gptq", tiny_model_dir, *GPTQ, "-o", tmp_path / "alone"], 1)
    assert alone.end() == [0], alone.said
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.slow
def test_torchrun_ends_with_one_error_when_a_rank_is_killed(tiny_model_dir, tmp_path):
    command = ["llmcompress", "gptq", tiny_model_dir, *GPTQ, "-o", tmp_path / "out", "--work", tmp_path / "work"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(torchrun(*command), stdout=log, stderr=log) as job:
        kill_once_staged(tmp_path / "work", lambda: rank_of(job.pid, 1))
        assert job.wait(60) != 0
    said = (tmp_path / "log").read_text()
    assert said.count("error: another rank has ended") == 1, said


def rank_of(parent, number):
    """The process that torchrun has started as a rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status, environment = (folder / "status").read_text(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{parent}\n" in status and f"RANK={number}".encode() in environment.split(b"\0"):
            return int(folder.name)
    raise AssertionError("no such rank")


# -- refusals -----------------------------------------------------------------------------------------------------


REFUSED = {
    "more ranks than batches": (
        ["gptq", "MODEL", "--samples", 2, "--length", 32, "--batch", 2],
        "fewer batches (1) than there are processes (2)",
    ),
    "a plan": (["plan", "gptq", "MODEL"], "plan is done by one process, and torchrun started 2"),
    "a dry run": (["rtn", "MODEL", "--dry-run"], "a plan is done by one process"),
    "another command": (["inspect", "MODEL"], "inspect is done by one process"),
    "a budget": (["gguf", "MODEL", "--bpw", 4.5], "choosing types by a size is done by one process"),
    "what all would refuse": (["gptq", "MODEL", "--bits", 7], "bits"),
    "a wrong model": (["gptq", "MODEL/nowhere"], "nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_line_of_one_rank(case, tiny_model_dir, tmp_path):
    arguments, why = REFUSED[case]
    places = ["-o", tmp_path / "out"] if arguments[0] not in ("inspect", "plan") else []
    started = Started(tmp_path, [str(item).replace("MODEL", str(tiny_model_dir)) for item in arguments] + places)
    assert started.end() == [2, 2], started.said
    lines = "".join(started.said)
    assert why in lines
    assert lines.count("error:") == 1, started.said
    assert not (tmp_path / "out").exists()


def test_events_and_gates_are_told_by_the_first_rank(tiny_model_dir, tmp_path):
    arguments = ["gptq", tiny_model_dir, *GPTQ, "-o", tmp_path / "out", "--junit", tmp_path / "gates.xml"]
    started = Started(tmp_path, [*arguments, "--strict", "any", "--json", "--log-format", "json"])
    assert started.end() == [0, 0], started.said
    events = [json.loads(line)["event"] for line in started.said[0].splitlines() if line.startswith('{"event"')]
    assert (events[0], events[-1]) == ("started", "done")
    assert events.count("layer") == 4
    assert not started.said[1]
    assert "--strict any" in (tmp_path / "gates.xml").read_text()


def test_a_deadline_stops_all_ranks_at_one_place(tiny_model_dir, tmp_path):
    arguments = ["gptq", tiny_model_dir, *GPTQ, "-o", tmp_path / "out", "--deadline", 0.01]
    started = Started(tmp_path, arguments)
    assert started.end() == [75, 75], started.said
    assert "".join(started.said).count("error:") == 1
    second = Started(tmp_path, arguments[:-2])
    assert second.end() == [0, 0], second.said
    assert "1 of 4 layers were finished before; going on" in second.said[0]


JOB = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"RANK": None}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"MASTER_PORT": None}, "WORLD_SIZE is 2, but MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1', not a number"),
    ],
)
def test_half_an_environment_is_refused(changes, why, monkeypatch):
    for name, value in {**JOB, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match=re.escape(why)):
        ranks.several()


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(PlanError, match="more ranks than GPUs, which are 1"):
        ranks.device_of("cuda")
    assert ranks.device_of("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ranks.device_of("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize("environment", [{}, {**JOB, "WORLD_SIZE": "1", "RANK": "0"}], ids=["none", "one rank"])
def test_one_process_joins_nothing(environment, main, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for module, name in ((distributed, "init_process_group"), (rendezvous_module, "rendezvous")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("connections were asked for"))
    assert main("gptq", tiny_model_dir, *GPTQ, "-o", tmp_path / "out", "--quiet") == 0


def test_a_rank_that_never_starts_is_not_waited_for_a_day(monkeypatch):
    for name, value in environments(2)[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "GATHERING", timedelta(seconds=1))
    with pytest.raises(RunError, match="another rank has ended or does not answer"):
        ranks.Ranks("cpu")


@pytest.fixture
def tiny_ids(tmp_path):
    """Token ids that every random model knows."""
    from safetensors.torch import save_file

    ids = torch.randint(90, (6, 32), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    return tmp_path / "ids.safetensors"
