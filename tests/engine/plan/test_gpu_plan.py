"""What a run on a GPU decides beforehand, and how it ends where there is none, or no room on it."""

import json
from dataclasses import replace

import pytest
import torch

from llmcompress.background import Ahead
from llmcompress.engine.plan import resources as resources
from llmcompress.engine.plan.memory_model import MemoryModel, Term
from llmcompress.engine.plan.resources import choose_resources
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run import prefetch
from llmcompress.errors import PlanError
from llmcompress.hardware import GpuMemory
from llmcompress.recipe import Calibration
from llmcompress.solve.row_blocks import solved_rows
from llmcompress.store.folder import Folder
from llmcompress.store.windows import write_windows

RUN = ("--samples", 4, "--length", 32, "--group-size", 32, "--bits", 4)
COST = MemoryModel([], [])
TEXT = Calibration(length=2048)


def test_without_a_gpu_one_is_refused_in_a_line(main, tiny_model_dir, tmp_path, capsys):
    assert main("gptq", tiny_model_dir, "-o", tmp_path / "out", "--device", "cuda", *RUN) == 2
    said = capsys.readouterr().err
    assert "--device cuda needs an NVIDIA GPU" in said
    assert "use --device cpu, or auto" in said
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_what_a_run_would_take_of_a_gpu(main, tiny_model_dir, tmp_path, capsys):
    common = ("gptq", tiny_model_dir, "-o", tmp_path / "out", *RUN)
    assert main("plan", *common, "--json", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["gpu_memory_bytes"] == 0
    assert main("plan", *common, "--json", "--device", "cuda") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["gpu_memory_bytes"] > 100e6
    assert planned["batch"] == 256
    assert main("plan", *common, "--device", "cuda") == 0
    assert "GPU memory" in capsys.readouterr().out


def test_a_gpu_runs_more_windows_at_once_by_one_thread(monkeypatch):
    options = Options(device="cuda")
    found = choose_resources(options, TEXT, lambda resources: COST, experts=True)
    assert (found.batch, found.threads, found.gpu, found.dtype) == (4, 1, True, "bfloat16")
    assert (
        choose_resources(replace(options, threads=3, batch=7), TEXT, lambda resources: COST, experts=True).threads == 3
    )


@pytest.mark.parametrize("source", ["option", "device"])
def test_batches_shrink_until_they_fit_and_else_the_run_is_refused(monkeypatch, source):
    limit = 3_500_000_000
    options = Options(device="cuda", max_gpu_memory=limit if source == "option" else None)
    total = GpuMemory(10, limit) if source == "device" else None
    monkeypatch.setattr("llmcompress.hardware.gpu_memory", lambda device=None: total)

    def cost(resources):
        return MemoryModel([Term("all", 1_000_000_000 * (1 + resources.batch), "gpu")], [])

    assert choose_resources(options, TEXT, cost, experts=True).batch == 2
    with pytest.raises(PlanError, match=r"up to 5\.50 GB of GPU memory are needed, .* 3\.50"):
        choose_resources(replace(options, batch=4), TEXT, cost, experts=True)


def test_a_gpu_solves_more_rows_at_once_within_its_memory():
    assert solved_rows(4096, gpu=False) == solved_rows(1 << 20, gpu=True) == 1536
    assert solved_rows(4096, gpu=True) == 4096


def test_out_of_gpu_memory_ends_in_a_line_and_the_same_command_goes_on(
    main, tiny_model_dir, tmp_path, capsys, monkeypatch
):
    from llmcompress.engine.run import layer as compress

    install, seen = compress.install, []

    def failing(layer, plan, coded):
        seen.append(plan.layer)
        if plan.layer == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        install(layer, plan, coded)

    arguments = ("gptq", tiny_model_dir, "-o", tmp_path / "out", *RUN)
    monkeypatch.setattr(compress, "install", failing)
    assert main(*arguments) == 1
    said = capsys.readouterr().err
    assert "out of GPU memory" in said
    assert "--max-gpu-memory" in said
    assert "Traceback" not in said
    assert [file.name for file in (tmp_path / "out.work").glob("section-*")] == ["section-00000.safetensors"]
    seen.clear()
    monkeypatch.setattr(compress, "install", lambda *arguments: (seen.append(arguments[1].layer), install(*arguments)))
    assert main(*arguments) == 0
    assert 0 not in seen


def test_windows_reach_a_gpu_through_pinned_memory_ahead_of_their_turn(monkeypatch, tmp_path):
    """With a stand-in for CUDA's streams: which waits for which, and that the windows are those of the file."""
    states = torch.randn(7, 5, 3)
    windows = write_windows(iter(states.split(2)), Folder(tmp_path) / "hidden.bin", torch.float32)
    log = []

    class Stream:
        def __init__(self, device=None):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def record_event(self):
            log.append("copied")
            return "event"

        def wait_event(self, event):
            log.append("waited")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: log.append("kept"), raising=False)
    read = windows.read
    monkeypatch.setattr(windows, "read", lambda span, pinned=False: read(span) if pinned else pytest.fail("not pinned"))
    spans = [slice(start, min(start + 2, 7)) for start in range(0, 7, 2)]
    made = prefetch.Prefetch(windows, spans, torch.device("cpu"))
    made._stream, made._ahead = (
        Stream(),
        Ahead(made._fetch, [(span.start, span.stop) for span in spans], prefetch.FETCHED),
    )
    for _ in range(2):
        assert torch.equal(torch.cat([made.read(span) for span in spans]), states)
    assert log.count("waited") == log.count("kept") == 8
    assert log.count("copied") == 8


def test_what_is_free_on_a_gpu_is_asked_of_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (3, 5))
    from llmcompress.hardware import gpu_memory

    assert gpu_memory() == GpuMemory(3, 5)
    assert resources.on_gpu("auto")
