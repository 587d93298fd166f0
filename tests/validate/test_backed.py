"""Validation runs: the whole packed model, by torch and by kernels on the emulator, beside the decoded one."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

import llmcompress.validate.backend
from emulated import COMPILER, EmulatedLauncher
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError, RunError
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.recipe import parse
from llmcompress.validate import agreement, backed, device_memory
from llmcompress.validate.evaluation import Evaluation
from llmcompress.validate.load import load_whole
from llmcompress.validate.packed import PackedLinear
from llmcompress.validate.request import Request, Timing
from llmcompress.validate.session import evaluate_whole
from tinyruns import FEW

SMALL = ["--length", 8, "--windows", 1, "--quiet"]
SHORT = Timing(batches=(1,), prompt=4, new=1, repeats=1)
SPEED = {"batch", "prompt", "new", "prefill_tokens_per_second", "decode_tokens_per_second", "cuda_graph"}


class Emulated(EmulatedLauncher):
    """What `open_gpu` gives, on this processor."""

    device = torch.device("cpu")

    @property
    def counts(self):
        return Counter(launch.kernel for launch in self.launches)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels run here."""
    if COMPILER is None:
        pytest.skip("there is no g++")
    launcher = Emulated()
    monkeypatch.setattr(llmcompress.validate.backend, "open_gpu", lambda say: launcher)
    return launcher


@pytest.fixture(scope="module")
def made(shallow_model_dir, tmp_path_factory):
    """made(format, **options): the tiny model rounded to nearest."""
    root, done = tmp_path_factory.mktemp("backed"), {}

    def make(format_="compressed-tensors", **options):
        key = repr((format_, sorted(options.items())))
        if key not in done:
            out = root / str(len(done))
            step = {"method": "rtn", "bits": 4, "group_size": 64, **options}
            calibration = {"samples": 2, "length": 16}
            step = {name: value for name, value in step.items() if value is not None}
            recipe = {"calibration": calibration, "steps": [step], "output": {"format": format_}}
            run(make_plan(parse(recipe), shallow_model_dir, Options(out=out)))
            done[key] = out
        return done[key]

    return make


@pytest.fixture
def evaluated(main, capsys):
    def go(*arguments):
        assert main("eval", *arguments, *SMALL, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return go


def by(model, backend, say=lambda line: None):
    """Figures and runtime of a short validation."""
    request = Request(model, None, "default", 8, 1, 1, "auto", None, backend=backend, timing=SHORT)
    found = evaluate_whole(request, lambda done, of: None, say)
    return found["figures"], found["runtime"]


def test_torch_gives_the_figures_of_the_streamed_evaluation_and_more(evaluated, made, shallow_model_dir, tmp_path):
    command = [made(), "--ref", shallow_model_dir]
    plain = evaluated(*command)
    file = tmp_path / "result.json"
    found = evaluated(*command, "--backend", "torch", "-o", file, "--fail-if", "logits_error > 1e-5")
    for name in ("perplexity", "kl", "top1", "tv"):
        assert found[name] == pytest.approx(plain[name], rel=1e-3)
    assert 0 < found["logits_error"] <= found["logits_error_max"] < 1e-5
    assert found["logits_error"] < found["logits_bound"]
    runtime = found["runtime"]
    assert (runtime["backend"], runtime["device"], runtime["launches"]) == ("torch", "cpu", {})
    assert runtime["linears"] == {"int4": 7 * FEW}
    assert [speed["batch"] for speed in runtime["speed"]] == [1, 8]
    assert all(set(speed) == SPEED and speed["decode_tokens_per_second"] > 0 for speed in runtime["speed"])
    assert runtime["reference_weights_bytes"] > runtime["weights_bytes"] > 0
    assert [speed["batch"] for speed in runtime["reference_speed"]] == [1, 8]
    saved = json.loads(file.read_text())
    Evaluation.model_validate_json(file.read_text())
    assert saved["runtime"] == runtime
    assert saved["figures"] == {key: value for key, value in found.items() if key != "runtime"}


@pytest.mark.parametrize(
    ("options", "name", "ran"),
    [
        ({}, "w4a16", {"matmul": 4}),  # query, key and value; output; gate and up; down
        ({"format_": "gptq", "bits": 3}, "w3a16", {"matmul": 4}),
        ({"format_": "awq", "sym": False}, "w4a16", {"matmul": 4}),
        ({"type": "nvfp4", "group_size": None}, "fp4a16", {"matmul": 4}),
        ({"bits": 8, "group_size": -1, "activations": "int8-token"}, "w8a8", {"quantise": 7, "int8_matmul": 7}),
    ],
    ids=["w4", "gptq-w3", "awq", "nvfp4", "w8a8"],
)
def test_kernels_run_the_whole_model_and_agree_with_its_codes(made, kernels, options, name, ran):
    figures, runtime = by(made(**options), "kernels")
    assert runtime["linears"] == {name: 7 * FEW}
    # a window, a prompt to warm up, one that is timed, one to go on from, a step to warm up, one that is timed
    assert runtime["launches"] == {kernel: count * FEW * 6 for kernel, count in ran.items()}
    assert figures["logits_error"] < figures["logits_bound"]
    assert runtime["weights_bytes"] < 3_100_000  # 5.3 MB in bfloat16


def test_a_wrong_scale_is_beyond_the_bound(made, kernels, monkeypatch):
    real = Emulated.__call__

    def wrong(self, launch, *arguments):
        scales = arguments[1]
        real(self, launch, arguments[0], scales.roll(1, 0) if scales.shape[0] > 1 else scales * 2, *arguments[2:])

    monkeypatch.setattr(Emulated, "__call__", wrong)
    figures, _ = by(made(), "kernels")
    assert figures["logits_error"] > 5 * figures["logits_bound"]


def test_people_see_what_ran_and_whether_it_agrees_and_a_gate_may_go_by_that(main, capsys, made):
    gate = ["--fail-if", "logits_error > 1e-12"]  # less than any type holds of a logit
    assert main("eval", made(), "--backend", "torch", "--compute-dtype", "bfloat16", *gate, *SMALL) == 3
    shown, error = capsys.readouterr()
    assert "the gate was logits_error > 1e-12" in error
    assert f"{7 * FEW} int4" in shown
    assert "within the bound" in " ".join(shown.split())
    assert "bfloat16" in shown
    assert "tokens/s" in shown


def test_gguf_blocks_stay_packed_in_the_order_of_the_model(shallow_model_dir, tmp_path):
    out = tmp_path / "out.gguf"
    recipe = {"steps": [{"method": "rtn", "gguf": {"type": "Q8_0"}}], "output": {"format": "gguf"}}
    run(make_plan(parse(recipe), shallow_model_dir, Options(out=out)))
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        dense = load_whole(out, dtype=torch.float32, linear=None, source=shallow_model_dir)(ids).logits
        packed = load_whole(out, dtype=torch.float32, source=shallow_model_dir)
        assert sum(isinstance(item, PackedLinear) for item in packed.modules()) == 7 * FEW
        assert torch.allclose(packed(ids).logits, dense, atol=1e-4)


def no_gpu(say):
    raise KernelsError("kernels need an NVIDIA GPU, and torch sees no GPU", "`eval --backend torch` runs anywhere")


def test_kernels_without_a_gpu_are_one_line(main, capsys, made, monkeypatch):
    monkeypatch.setattr(llmcompress.validate.backend, "open_gpu", no_gpu)
    assert main("eval", made(), "--backend", "kernels", *SMALL) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: kernels need an NVIDIA GPU, and torch sees no GPU",
        "  hint: `eval --backend torch` runs anywhere",
    ]


def test_auto_falls_back_to_torch_and_says_why_once(made, monkeypatch):
    monkeypatch.setattr(llmcompress.validate.backend, "open_gpu", no_gpu)
    said = []
    _, runtime = by(made(), "auto", said.append)
    assert runtime["backend"] == "torch"
    assert said == ["torch multiplies: kernels need an NVIDIA GPU, and torch sees no GPU"]


def test_what_kernels_do_not_take_is_said_once_and_evaluated(main, capsys, made, kernels):
    assert main("eval", made(format_="gptq", group_size=16), "--backend", "kernels", *SMALL, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["runtime"]["linears"] == {"torch": 7 * FEW}
    (line,) = shown.err.splitlines()
    assert line.startswith("torch decodes and multiplies: ")
    assert "16" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "kernels", "--device", "cpu"], "kernels do not run with --device cpu"),
        (["--backend", "kernels", "--compute-dtype", "float32"], "kernels compute in 16 bits"),
        (["--backend", "jax"], "invalid value for '--backend'"),
        (["--fail-if", "logits_error > 1"], "'logits_error', which is not measured"),
    ],
)
def test_what_does_not_go_together_is_refused(main, capsys, made, kernels, arguments, words):
    assert main("eval", made(), *arguments, *SMALL) == 2
    assert words in capsys.readouterr().err


def test_memory_that_a_gpu_lacks_is_refused_before_anything_is_loaded(made, shallow_model_dir, monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 80 * 10**9))
    need = device_memory.validation_memory(made(), shallow_model_dir, torch.bfloat16, 4, 64).peak("gpu")
    device_memory.refuse_beyond(need, gpu)
    with pytest.raises(PlanError, match=r"about 2\.5 GB of GPU memory, of which 1\.0 GB are free"):
        device_memory.refuse_beyond(2_500_000_000, gpu)
    device_memory.refuse_beyond(10**15, torch.device("cpu"))


def test_what_is_foreseen_grows_with_what_is_asked(made, shallow_model_dir):
    def need(model=None, ref=None, windows=4, length=64):
        return device_memory.validation_memory(model or made(), ref, torch.bfloat16, windows, length).peak("gpu")

    assert need(windows=100_000) > need()
    assert need(ref=shallow_model_dir, windows=100_000) > need(windows=100_000)
    assert need(length=1 << 16) > need()
    plain = sum(value.numel() for value in load_whole(shallow_model_dir, dtype=torch.bfloat16).parameters()) * 2
    headers = device_memory.checkpoint_headers(shallow_model_dir)
    assert device_memory.resident_bytes(headers, torch.bfloat16) == plain
    packed = device_memory.checkpoint_headers(made())
    model = load_whole(made(), dtype=torch.bfloat16)
    assert device_memory.resident_bytes(packed, torch.bfloat16) == pytest.approx(backed._bytes_of(model), rel=0.1)


def test_running_out_of_memory_all_the_same_is_one_line():
    with pytest.raises(RunError, match="out of GPU memory") as caught, backed._memory_of(torch.device("cpu")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 1


def test_a_constant_in_the_logits_is_no_error_and_scaling_is():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    assert float(agreement.logits_errors(logits + 3, logits).max()) < 1e-5
    assert agreement.logits_errors(logits * 1.5, logits).tolist() == pytest.approx([0.5] * 5, rel=1e-4)
    found = agreement.agreement_figures(np.array([[0.3, 0.4]]), torch.bfloat16, 4, False)
    assert found == {"logits_error": 0.3536, "logits_error_max": 0.4, "logits_bound": 0.03125}
