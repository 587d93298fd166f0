"""What a run promises whatever befalls it: the same bytes, bounded memory, no silent damage.

Runs are processes of their own, started as `python -m llmcompress` is; most of them by a fork of one that has its
imports done, which saves seconds each.
"""

import hashlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from forkserver import PROCESSES
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.recipe import parse
from llmcompress.store.staging import Staging
from rounds import ROUNDS

LAYERS = 4
SAMPLES, LENGTH = 6, 32
GPTQ = ["--bits", 4, "--group-size", 64, "--samples", SAMPLES, "--length", LENGTH, "--batch", 2]
KILLED = -signal.SIGKILL
STOPPED = 75
EVERY = 1 if ROUNDS > 1 else 5  # of which change a run is killed before
REFERENCE = os.environ.get("LLMCOMPRESS_REFERENCE_MODEL")


# -- starting and ending runs ---------------------------------------------------------------------------------------


class Started:
    """A run under way in a process of its own."""

    def __init__(self, folder, arguments, doomed=None):
        self.log = folder / f"log-{time.monotonic_ns()}"
        self.process = PROCESSES.Process(target=_main, args=(list(map(str, arguments)), self.log, doomed))
        self.process.start()

    def end(self, timeout=300):
        """Its exit code; -9 if it was killed."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, "the run hangs"
        return self.process.exitcode

    @property
    def said(self):
        """What it wrote to stdout and stderr."""
        return self.log.read_text()


def _main(arguments, log, doomed):
    """In the process: `python -m llmcompress ARGUMENTS`. doomed: (function, argument) that makes an audit hook."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["llmcompress", *arguments]
    if doomed is not None:
        sys.addaudithook(doomed[0](doomed[1]))
    runpy.run_module("llmcompress", run_name="__main__")


def once_staged(asked):
    """An audit hook that kills the process at whatever it asks of the system next once section `number` is there."""
    (work, number), busy = asked, []

    def hook(*_):
        if not busy:
            busy.append(True)  # looking asks the system, too
            if sections(work, number):
                os.kill(os.getpid(), signal.SIGKILL)
            busy.clear()

    return hook


def at_change(asked):
    """An audit hook that kills the process before it makes its change number `count`, from 0, to files of `folder`."""
    folder, left = str(asked[0]), [asked[1] + 1]

    def hook(event, arguments):
        if event == "open":  # path, mode, flags
            written = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            changes = written and not isinstance(arguments[0], int)  # a number is a file that was opened before
        else:
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
        if changes:
            path = str(arguments[0])
            left[0] -= path.startswith(folder) or path[0] != "/"  # or relative to an open directory
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def finish(folder, arguments):
    """Run a command to its end, which has to be a good one."""
    started = Started(folder, arguments)
    assert started.end() == 0, started.said
    return started


def cold(*arguments, **environment):
    """`python -m llmcompress` from nothing, with an environment."""
    command = [sys.executable, "-m", "llmcompress", *map(str, arguments)]
    # the shell between keeps this process's own size out of what the run measures as its peak
    between = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]
    done = subprocess.run(
        [*between, *command], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done


def digest(folder):
    """SHA-256 of every file below a folder, by relative path."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def sections(work, number=None):
    """Files of finished sections in a work directory, or those of one."""
    return sorted(work.glob(f"section-{'' if number is None else f'{number:05d}'}*.safetensors"))


def raw_tensors(file):
    """Header and bytes of every tensor of a safetensors file, by its published layout alone."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return data[8:start], {name: data[start + begin : start + end] for name, (begin, end) in spans.items()}


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """ids(samples, length, vocabulary=96): a calibration file of random tokens."""
    from llmcompress.calib.pack import save

    root = tmp_path_factory.mktemp("ids")

    def make(samples, length, vocabulary=96):
        file = root / f"{samples}-{length}-{vocabulary}.safetensors"
        if not file.exists():
            generator = torch.Generator().manual_seed(0)
            save(torch.randint(3, vocabulary, (samples, length), generator=generator), file)
        return file

    return make


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    """The output of a run that nothing disturbed, of one OpenMP thread, started from nothing."""
    out = tmp_path_factory.mktemp("whole") / "out"
    cold("gptq", tiny_model_dir, "-o", out, *GPTQ, OMP_NUM_THREADS="1")
    return out


@pytest.fixture(scope="module")
def staged(tiny_model_dir, tmp_path_factory):
    """The work directory of a run that was killed after its third section."""
    folder = tmp_path_factory.mktemp("staged")
    work = folder / "out.work"
    command = ["gptq", tiny_model_dir, "-o", folder / "out", *GPTQ]
    killed = Started(folder, command, doomed=(once_staged, (work, 2)))
    assert killed.end() == KILLED, killed.said
    return work


# -- kill -9 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(LAYERS))
def test_kill_9_after_any_section_leaves_what_the_same_command_finishes(tiny_model_dir, whole, tmp_path, number):
    out, work = tmp_path / "out", tmp_path / "out.work"
    command = ["gptq", tiny_model_dir, "-o", out, *GPTQ]
    killed = Started(tmp_path, command, doomed=(once_staged, (work, number)))
    assert killed.end() == KILLED, killed.said
    assert len(sections(work)) == number + 1
    assert not out.exists()
    finish(tmp_path, command)
    assert digest(out) == digest(whole)
    assert not work.exists()


def kill_at_random(folder, command, out, expected, kills, seconds):
    """Kill a command's runs after random delays, up to `seconds`; one that ends before is compared, and begun anew."""
    delays = random.Random(0)
    done = 0
    while done < kills:
        started = Started(folder, command)
        started.process.join(delays.uniform(0, seconds))
        started.process.kill()
        code = started.end()
        assert code in (KILLED, 0), started.said
        done += code == KILLED
        if out.exists():
            assert digest(out).items() >= expected.items()
            if code == KILLED:  # it was published, but what is left was not put away
                finish(folder, [*command, "--overwrite"])
            assert digest(out) == expected
            shutil.rmtree(out)
    finish(folder, command)
    assert digest(out) == expected
    assert not [file for file in folder.iterdir() if file.suffix in (".work", ".partial")]


def test_six_kills_at_random_times_change_nothing(tiny_model_dir, whole, tmp_path):
    out = tmp_path / "out"
    command = ["gptq", tiny_model_dir, "-o", out, *GPTQ]
    begin = time.perf_counter()
    finish(tmp_path, command)
    seconds = time.perf_counter() - begin
    shutil.rmtree(out)
    kill_at_random(tmp_path, command, out, digest(whole), 6, seconds)


@pytest.mark.slow
def test_kills_at_random_times_change_nothing_of_a_larger_model(random_model_dir, ids, tmp_path):
    if REFERENCE:
        model, source = Path(REFERENCE), "default"
    else:
        wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = random_model_dir("llama", num_hidden_layers=8, **wide)
        source = ids(8, 128)
    out = tmp_path / "out"
    sizes = ["--bits", 4, "--group-size", 64, "--samples", 8, "--length", 128]
    command = ["gptq", model, "-o", out, *sizes, "--calibration", source]
    begin = time.perf_counter()
    finish(tmp_path, command)
    seconds = time.perf_counter() - begin
    expected = digest(out)
    shutil.rmtree(out)
    kill_at_random(tmp_path, command, out, expected, 5, seconds)


def die_before(random_model_dir, ids, folder, counts):
    """Kill runs before their file changes number `counts`, until one ends before; then say the same command again.

    How many died, and what was said where the second run did not end well.
    """
    model = random_model_dir("llama", num_hidden_layers=2)
    sizes = ["--bits", 4, "--group-size", 32, "--samples", 3, "--length", 16, "--batch", 2]
    command = ["gptq", model, *sizes, "--calibration", ids(3, 16), "-o"]
    finish(folder, [*command, folder / "whole"])
    expected = digest(folder / "whole")
    died, failed = 0, {}
    for count in counts:
        place = folder / f"change-{count}"
        out = place / "out"
        place.mkdir()
        doomed = Started(folder, [*command, out], doomed=(at_change, (place, count)))
        code = doomed.end()
        assert code in (KILLED, 0), doomed.said
        if code == KILLED:
            died += 1
            again = Started(folder, [*command, out, *(["--overwrite"] if out.exists() else [])])
            if again.end():
                failed[count] = again.said
                continue
        assert digest(out) == expected, f"killed before change {count}"
        assert list(place.iterdir()) == [out], f"killed before change {count}"
        if code == 0:
            break
    return died, failed


# the work directory is made, and what the run is written into it, under a passing name and then its own
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_kill_while_a_work_directory_is_begun_changes_nothing(random_model_dir, ids, tmp_path, count):
    assert die_before(random_model_dir, ids, tmp_path, [count]) == (1, {})


@pytest.mark.slow
def test_a_kill_before_any_change_to_a_file_changes_nothing(random_model_dir, ids, tmp_path):
    died, failed = die_before(random_model_dir, ids, tmp_path, range(0, 1000, EVERY))
    assert died > 30 / EVERY
    assert failed == {}


# -- the same bytes -------------------------------------------------------------------------------------------------


def test_two_runs_give_the_same_bytes(tiny_model_dir, whole, tmp_path):
    out = tmp_path / "out"
    finish(tmp_path, ["gptq", tiny_model_dir, "-o", out, *GPTQ])
    assert digest(out) == digest(whole)


def test_the_number_of_openmp_threads_changes_no_byte(tiny_model_dir, whole, tmp_path):
    cold("gptq", tiny_model_dir, "-o", tmp_path / "out", *GPTQ, OMP_NUM_THREADS="2")
    assert digest(tmp_path / "out") == digest(whole)


def test_the_number_of_threads_changes_no_byte(random_model_dir, ids, tmp_path):
    wide = {"hidden_size": 448, "intermediate_size": 896, "num_attention_heads": 7, "num_key_value_heads": 7}
    model = random_model_dir("llama", num_hidden_layers=1, **wide)
    command = ["gptq", model, "--group-size", 32, "--samples", 24, "--length", 16, "--calibration", ids(24, 16)]
    compare_threads([*command, "--batch", 1, "--compute-dtype", "bfloat16"], (1, 2, 3), tmp_path)


def test_the_number_of_threads_changes_no_byte_of_experts(random_model_dir, ids, tmp_path):
    """Of starved ones: they lean on sums over all tokens that enter their block."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = random_model_dir("mixtral", num_hidden_layers=1, **wide)
    fine = ["--bits", 8, "--group-size", 32, "--descent", 0, "--clip", "minmax"]  # where the last bit of a sum shows
    command = ["gptq", model, *fine, "--samples", 96, "--length", 4, "--calibration", ids(96, 4)]
    compare_threads([*command, "--batch", 1, "--compute-dtype", "float32"], (1, 2, 3, 3), tmp_path)


def compare_threads(command, counts, folder):
    found = []
    for turn, count in enumerate(counts):
        finish(folder, [*command, "-o", folder / f"{turn}", "--threads", count])
        found.append(digest(folder / f"{turn}"))
    assert [count for count, other in zip(counts, found, strict=True) if other != found[0]] == []


def test_a_killed_run_may_go_on_with_another_number_of_threads(tiny_model_dir, whole, tmp_path):
    out = tmp_path / "out"
    command = ["gptq", tiny_model_dir, "-o", out, *GPTQ, "--threads"]
    for count, number in ((1, 0), (3, 1)):
        killed = Started(tmp_path, [*command, count], doomed=(once_staged, (tmp_path / "out.work", number)))
        assert killed.end() == KILLED, killed.said
    finish(tmp_path, [*command, 2])
    assert digest(out) == digest(whole)


def test_the_report_holds_hashes_that_others_can_compute(tiny_model_dir, whole, tmp_path):
    report = json.loads((whole / "report.json").read_text())
    _, tensors = raw_tensors(whole / "model.safetensors")
    assert report["tensors"] == {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}

    config, weights = tiny_model_dir / "config.json", tiny_model_dir / "model.safetensors"
    header, _ = raw_tensors(weights)
    size = weights.stat().st_size
    layout = config.read_bytes() + f"model.safetensors:{size}:".encode() + header
    assert report["source"]["config_sha256"] == hashlib.sha256(config.read_bytes()).hexdigest()
    assert report["source"]["headers_sha256"] == hashlib.sha256(layout).hexdigest()

    asked = ["--samples", SAMPLES, "--length", LENGTH]
    finish(tmp_path, ["calib", "pack", tiny_model_dir, "-o", tmp_path / "ids.safetensors", *asked])
    _, packed = raw_tensors(tmp_path / "ids.safetensors")
    tokens = hashlib.sha256(f"({SAMPLES}, {LENGTH})".encode() + packed["input_ids"]).hexdigest()
    assert report["calibration"] == {"sha256": tokens, "samples": SAMPLES, "length": LENGTH}

    assert report["recipe"] == yaml.safe_load((whole / "llmcompress.yaml").read_text())
    assert report["recipe"]["steps"][0]["bits"] == 4


def test_the_report_tells_sources_apart_that_differ_in_their_weights(tiny_model_dir, whole, tmp_path):
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    spoil(model / "model.safetensors", "input_layernorm.weight")
    finish(tmp_path, ["gptq", model, "-o", tmp_path / "out", *GPTQ])
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    known = json.loads((whole / "report.json").read_text())
    assert found["tensors"] != known["tensors"]
    assert found["source"] != known["source"]


# -- stopping, and what may go on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_sigterm_stops_with_75_and_the_same_command_finishes(tiny_model_dir, whole, tmp_path, number):
    out, work = tmp_path / "out", tmp_path / "out.work"
    command = ["gptq", tiny_model_dir, "-o", out, *GPTQ]
    started = Started(tmp_path, command)
    while not sections(work, number):
        assert started.process.is_alive(), started.said
        time.sleep(0.002)
    os.kill(started.process.pid, signal.SIGTERM)
    assert started.end() == STOPPED, started.said
    assert f"error: stopped at a safe point hint: run the same command again to go on; finished work is in {work}" in (
        " ".join(started.said.split())
    )
    assert not out.exists()
    assert sections(work, number)
    finish(tmp_path, command)
    assert digest(out) == digest(whole)


def test_a_deadline_stops_with_75_after_a_section_and_every_start_gets_further(tiny_model_dir, whole, tmp_path):
    out, work = tmp_path / "out", tmp_path / "out.work"
    command = ["gptq", tiny_model_dir, "-o", out, *GPTQ, "--deadline", 0]
    for number in range(LAYERS - 1):
        started = Started(tmp_path, command)
        assert started.end() == STOPPED, started.said
        assert len(sections(work)) == number + 1
        assert not out.exists()
    finish(tmp_path, command)
    assert digest(out) == digest(whole)


def kept(work):
    """What a work directory holds, without who held it last."""
    return {name: sha256 for name, sha256 in digest(work).items() if name != ".llmcompress-work"}


CHANGES = {
    "bits": (["--bits", 8], "recipe.steps[0].bits was 4, now 8"),
    "group size": (["--group-size", 32], "recipe.steps[0].group_size was 64, now 32"),
    "calibration text": (["--calibration", "TEXT"], "recipe.calibration.source was default, now "),
    "number of windows": (["--samples", 7], "recipe.calibration.samples was 6, now 7"),
    "seed": (["--seed", 1], "recipe.calibration.seed was 0, now 1"),
    "drift": (["--qep-alpha", 0.25], "recipe.steps[0].qep_alpha was 0.5, now 0.25"),
    "batch": (["--batch", 3], "batch was 2, now 3"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_staged_run_refuses_another_recipe_and_stays_as_it_is(tiny_model_dir, tiny_eval_text, staged, tmp_path, what):
    added, message = CHANGES[what]
    added = [tiny_eval_text if item == "TEXT" else item for item in added]
    work = Path(shutil.copytree(staged, tmp_path / "out.work"))
    before = kept(work)
    refused = Started(tmp_path, ["gptq", tiny_model_dir, "-o", tmp_path / "out", *GPTQ, *added])
    assert refused.end() == 2, refused.said
    assert f"holds another run: {message}" in " ".join(refused.said.split())
    assert "Traceback" not in refused.said
    assert kept(work) == before
    assert not (tmp_path / "out").exists()


def test_a_staged_run_refuses_the_same_file_with_other_text_and_another_model(tiny_model_dir, tiny_eval_text, tmp_path):
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    text, work = tmp_path / "text.txt", tmp_path / "out.work"
    text.write_text(tiny_eval_text.read_text())
    command = ["gptq", model, "-o", tmp_path / "out", *GPTQ, "--calibration", text]
    killed = Started(tmp_path, command, doomed=(once_staged, (work, 0)))
    assert killed.end() == KILLED, killed.said
    before = kept(work)
    text.write_text(tiny_eval_text.read_text()[::-1])
    for key in ("tokens", "model"):
        refused = Started(tmp_path, command)
        assert refused.end() == 2, refused.said
        assert f"holds another run: {key} was " in " ".join(refused.said.split())
        assert kept(work) == before
        data = bytearray((model / "model.safetensors").read_bytes())  # for the second time: a little training
        for place in range(len(data) // 2, len(data), 2):
            data[place] ^= 1
        (model / "model.safetensors").write_bytes(data)


# -- memory and work ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_layers(random_model_dir, ids, tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    peak = {}
    for layers in (12, 48):  # of 1.3 MB each: to keep 36 more, even in bfloat16, would cost a tenth
        model = random_model_dir("llama", num_hidden_layers=layers, **wide)
        sizes = ["--bits", 4, "--group-size", 64, "--samples", 16, "--length", 64, "--calibration", ids(16, 64)]
        done = cold("gptq", model, "-o", tmp_path / f"{layers}", *sizes, "--json")
        peak[layers] = json.loads(done.stdout)["peak_memory_bytes"]
    assert abs(peak[48] / peak[12] - 1) < 0.05


@pytest.mark.slow
def test_peak_memory_is_not_that_of_whoever_starts_the_run(random_model_dir, tmp_path):
    starter = (
        "import subprocess, sys; held = bytearray(1_500_000_000); held[::4096] = b'x' * len(held[::4096]);"
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    )
    command = [sys.executable, "-m", "llmcompress", "rtn", random_model_dir("llama"), "-o", tmp_path / "out", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", starter, *map(str, command)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["peak_memory_bytes"] < 1e9


@pytest.mark.parametrize(("samples", "original", "batch"), [(7, 4, 2), (7, 7, 3), (7, 3, 2), (5, 0, 1)])
def test_every_window_runs_through_every_matrix_of_a_layer_once(
    tiny_model_dir, ids, tmp_path, samples, original, batch
):
    """Once for statistics and once for what leaves the layer at most, and one window more to look at the layer."""
    seen = []  # (module, windows) of every matrix evaluated; appended to by all threads

    def look(module, inputs, _):
        if isinstance(module, torch.nn.Linear):
            seen.append((module, inputs[0].shape[0]))

    attention, evaluated = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, *rest, **options):
        evaluated.append(query.shape[0])
        return attention(query, *rest, **options)

    step = {"method": "gptq", "bits": 4, "group_size": 64, "qep_samples": max(1, original), "qep_alpha": 0.5}
    step["qep_alpha"] *= original > 0
    calibration = {"source": str(ids(7, 16)), "samples": samples, "length": 16}
    plan = make_plan(
        parse({"calibration": calibration, "steps": [step]}),
        tiny_model_dir,
        Options(out=tmp_path / "out", batch=batch, compute_dtype="float32"),
    )
    handle = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
            run(plan)
    finally:
        handle.remove()

    paired = min(samples, -(-original // batch) * batch)  # whole batches, so that both streams are cut alike
    streams = [samples, paired] if original else [samples]
    windows, calls = Counter(), Counter()
    for module, count in seen:
        windows[module] += count
        calls[module] += 1
    assert len(windows) == 7 * LAYERS * len(streams)
    batches = [-(-count // batch) for count in streams]
    assert max(windows.values()) <= max(streams) + 1
    assert max(calls.values()) <= max(batches) + 1
    assert sum(windows.values()) <= 7 * LAYERS * sum(count + 1 for count in streams)
    # attention: all windows of all layers, each once
    assert LAYERS * sum(streams) <= sum(evaluated) <= LAYERS * sum(count + 1 for count in streams)
    assert len(evaluated) <= LAYERS * sum(count + 1 for count in batches)


# -- damage ---------------------------------------------------------------------------------------------------------


def spoil(file, ending):
    """Flip a low bit in the data of the first tensor of a safetensors file whose name ends so."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = next(name for name in header if name.endswith(ending))
    data[start + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


def spoil_records(file):
    """Change a digit of a loss in the header of a section."""
    data = bytearray(file.read_bytes())
    place = data.index(b"0.", data.index(b"relative_error")) + 3
    data[place] ^= 1
    file.write_bytes(data)


DAMAGE = [
    pytest.param(partial(spoil, ending=".codes"), id="codes"),
    pytest.param(partial(spoil, ending=".scale"), id="scales"),
    pytest.param(partial(spoil, ending=".zero"), id="zero points"),
    pytest.param(partial(spoil, ending=".group_index"), id="groups"),
    pytest.param(spoil_records, id="records"),
    pytest.param(lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]), id="half"),
    pytest.param(lambda file: file.write_bytes(b""), id="empty"),
]


def carry_on(model, staged, folder, change):
    """Go on with a copy of a staged run after a change to its second section; the run, and the section."""
    work = Path(shutil.copytree(staged, folder / "out.work"))
    (section,) = sections(work, 1)
    change(section)
    started = Started(folder, ["gptq", model, "-o", folder / "out", *GPTQ])
    return started, section


@pytest.mark.parametrize("change", DAMAGE)
def test_a_damaged_section_never_becomes_other_bytes(tiny_model_dir, whole, staged, tmp_path, change):
    started, section = carry_on(tiny_model_dir, staged, tmp_path, change)
    code = started.end()
    assert "Traceback" not in started.said
    if code == 0:
        assert digest(tmp_path / "out") == digest(whole)
    else:
        assert code == 1, started.said
        assert section.name in started.said
        assert not (tmp_path / "out").exists()


def test_a_missing_section_is_made_again(tiny_model_dir, whole, staged, tmp_path):
    """What the hint for a damaged section says to do: remove this file and run again."""
    started, _ = carry_on(tiny_model_dir, staged, tmp_path, Path.unlink)
    assert started.end() == 0, started.said
    assert digest(tmp_path / "out") == digest(whole)


# -- one run at a time ----------------------------------------------------------------------------------------------


def test_a_work_directory_serves_one_run_at_a_time(tmp_path):
    first = Staging(tmp_path / "work", {"bits": 4})
    with pytest.raises(PlanError, match="is in use by another run"):
        Staging(tmp_path / "work", {"bits": 4})
    first.close()
    assert Staging(tmp_path / "work", {"bits": 4}).resumed
