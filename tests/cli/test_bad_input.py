"""Bad input as a user meets it: one clear line, the right exit code, soon, and nothing left behind."""

import json
import os
import resource
import shutil
import struct
import time
from pathlib import Path

import pytest

import llmcompress.engine.execute
import llmcompress.validate.session  # noqa: F401 (what is imported once is not what a refusal takes)
from llmcompress.cli.options import parse_set
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import CheckpointError
from llmcompress.recipe import parse

WEIGHTS = "model.safetensors"
SHORT = ["--bits", "4", "--group-size", "64", "--samples", "2", "--length", "16"]


@pytest.fixture
def model(tiny_model_dir, tmp_path):
    """A copy of the tiny model."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def one_line(capsys, words):
    """What went to stderr is one error line, with all the words, and perhaps a hint."""
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    lines = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, shown
    assert [line for line in shown.splitlines() if not line.startswith(("error: ", "  hint: "))] == []
    for word in words:
        assert word in shown, shown


def config(**changes):
    def change(model):
        data = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**data, **changes}))

    return change


def cut(size):
    return lambda model: os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size + size if size < 0 else size)


def header(change):
    """Replace the JSON of the weights' header."""

    def rewrite(model):
        data = (model / WEIGHTS).read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        raw = change(data[8:end])
        (model / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + data[end:])

    return rewrite


def index(shard):
    def split(model):
        (model / WEIGHTS).rename(model / "model-00001-of-00001.safetensors")
        shutil.copy(model / "model-00001-of-00001.safetensors", model.parent / "outside.safetensors")
        (model / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))

    return split


def write(name, text):
    return lambda model: (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def recipe(text):
    return lambda model: (model.parent / "recipe.yaml").write_text(text)


def nothing(model):
    pass


RTN, GPTQ, RUN = ["rtn", "MODEL"], ["gptq", "MODEL"], ["run", "RECIPE", "MODEL"]
STEP = "steps: [{method: rtn, bits: 4}]"

# what headers and options tell: how the model is spoilt, the command, words of the message
EARLY = {
    "empty weights": (cut(0), GPTQ, [WEIGHTS, "not a whole safetensors file"]),
    "weights cut in the prefix": (cut(7), GPTQ, [WEIGHTS, "not a whole safetensors file"]),
    "weights cut in the header": (cut(300), GPTQ, [WEIGHTS, "not a whole safetensors file"]),
    "weights cut in the data": (cut(1_000_000), GPTQ, [WEIGHTS, "truncated"]),
    "weights cut by a byte": (cut(-1), RTN, [WEIGHTS, "truncated"]),
    "weights that run on": (lambda m: os.truncate(m / WEIGHTS, 9_000_000), RTN, [WEIGHTS, "belong to no tensor"]),
    "a tensor twice": (header(lambda raw: raw.replace(b"layers.1.mlp.up", b"layers.0.mlp.up")), RTN, ["stands twice"]),
    "a tensor less": (
        header(lambda raw: raw.replace(b"layers.3.input_layernorm", b"layers.3.input_layernorn")),
        RTN,
        [WEIGHTS, "has no tensor model.layers.3.input_layernorm.weight"],
    ),
    "a layer far away": (
        header(lambda raw: raw.replace(b"layers.3.", b"layers.999999999.")),
        RTN,
        [WEIGHTS, "no matrices of most layers below model.layers.999999999"],
    ),
    "a layer beyond counting": (
        header(lambda raw: raw.replace(b"layers.3.", b"layers." + b"9" * 5000 + b".")),
        RTN,
        ["config.json", "speaks of 4 layers"],
    ),
    "a tensor beyond counting": (
        header(lambda raw: raw.replace(b"layers.3.mlp.up_proj", b"layers." + b"9" * 5000 + b".mlp.up_proj")),
        RTN,
        [WEIGHTS, "has no tensor model.layers.3.mlp.up_proj.weight"],
    ),
    "no last norm": (
        header(lambda raw: raw.replace(b'"model.norm', b'"model.morn')),
        RTN,
        [WEIGHTS, "model.norm.weight"],
    ),
    "no embedding": (header(lambda raw: raw.replace(b"embed_tokens", b"embed_tokers")), RTN, [WEIGHTS, "embed_tokens"]),
    "a missing shard": (index("gone.safetensors"), GPTQ, ["index.json", "gone.safetensors", "missing"]),
    "a shard above": (index("../outside.safetensors"), GPTQ, ["index.json", "'../outside.safetensors'"]),
    "a shard anywhere": (index("/etc/passwd.safetensors"), GPTQ, ["index.json", "'/etc/passwd.safetensors'"]),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), GPTQ, [f"has no {WEIGHTS}"]),
    "no config": (lambda m: (m / "config.json").unlink(), GPTQ, ["config.json is missing"]),
    "a broken config": (write("config.json", "{"), GPTQ, ["config.json", "not valid JSON"]),
    "a config without end": (write("config.json", "[" * 100_000), GPTQ, ["config.json", "not valid JSON"]),
    "another width": (config(hidden_size=512), RTN, [WEIGHTS, "config.json", "512"]),
    "another inner width": (config(intermediate_size=768), RTN, [WEIGHTS, "config.json", "768"]),
    "another vocabulary": (config(vocab_size=1201), RTN, [WEIGHTS, "config.json", "1201"]),
    "more heads": (config(num_attention_heads=8), RTN, [WEIGHTS, "q_proj", "config.json", "512"]),
    "more layers": (config(num_hidden_layers=5), RTN, [WEIGHTS, "config.json", "5 layers"]),
    "fewer layers": (config(num_hidden_layers=3), RTN, [WEIGHTS, "config.json", "3 layers"]),
    "a billion layers": (config(num_hidden_layers=10**9), RTN, ["config.json", "num_hidden_layers is 1000000000"]),
    "a billion layers to evaluate": (config(num_hidden_layers=10**9), ["eval", "MODEL"], ["num_hidden_layers is"]),
    "half a layer": (config(num_hidden_layers=3.5), RTN, ["config.json", "num_hidden_layers is 3.5"]),
    "width in words": (config(hidden_size="wide"), GPTQ, ["config.json", "hidden_size is 'wide'"]),
    "a head of its own that is not there": (config(tie_word_embeddings=False), RTN, [WEIGHTS, "lm_head.weight"]),
    "no type": (config(model_type=None, auto_map=None), GPTQ, ["--trust-remote-code"]),
    "its own code": (config(auto_map={"AutoModel": "evil.Model"}), GPTQ, ["config.json", "--trust-remote-code"]),
    "already quantised": (config(quantization_config={"quant_method": "awq"}), GPTQ, ["already quantised (awq)"]),
    "escape codes": (config(quantization_config={"quant_method": "a\n\x1b[2J"}), GPTQ, [r"(a \x1b[2J)"]),
    "a hub id": (nothing, ["gptq", "meta-llama/Llama-2-7b"], ["offline"]),
    "no model": (nothing, ["gptq", "GONE"], ["gone does not exist"]),
    "an option no recipe has": (recipe(STEP.replace("bits", "bitz")), RUN, ["'bitz'", "did you mean 'bits'"]),
    "a part no recipe has": (recipe(f"{STEP}\ncalibrate: {{}}"), RUN, ["'calibrate'", "did you mean 'calibration'"]),
    "a method nobody knows": (recipe(STEP.replace("rtn", "rtm")), RUN, ["'rtm'", "did you mean"]),
    "a recipe without end": (recipe("steps: " + "[" * 5000), RUN, ["recipe.yaml", "nests"]),
    "a recipe that is none": (recipe("steps: ["), RUN, ["recipe.yaml", "not valid YAML"]),
    "a value that is none": (recipe("steps: [{method: rtn, bits: !!int ''}]"), RUN, ["recipe.yaml", "not valid YAML"]),
    "no recipe": (nothing, RUN, ["recipe.yaml", "cannot be read"]),
    "nothing left to round": (
        nothing,
        ["int8", "MODEL", "--outliers", "topk", "--outlier-count", "256", "--format", "dense"],
        ["256 outlier channels leave nothing to round of the 256 inputs", "q_proj"],
    ),
    "a rotation of nothing": (nothing, ["rotate", "MODEL", "--no-residual", "--no-values"], ["nothing is turned"]),
    "a group that does not fit": (nothing, [*RTN, "--group-size", "100"], ["group size 100 does not divide", "q_proj"]),
    "a group of nothing": (nothing, [*RTN, "--group-size", "0"], ["group size 0"]),
    "bits nobody has": (nothing, [*RTN, "--bits", "7"], ["bits = 7"]),
    "a grid a format cannot hold": (nothing, [*RTN, "--format", "bitsandbytes"], ["bitsandbytes cannot hold int4"]),
    "a format nobody knows": (nothing, [*RTN, "--format", "gguff"], ["unknown format 'gguff'"]),
    "a pattern that is none": (nothing, [*RTN, "--set", "oops"], ["--set 'oops'"]),
    "a pattern of nothing": (
        nothing,
        [*RTN, "--set", "nothing.here: {bits: 8}"],
        ["'nothing.here'", "matches no matrix"],
    ),
    "an odd value in a pattern": (nothing, [*RTN, "--set", "mlp.*: {bits: [1]}"], ["set.mlp.*.bits = [1]"]),
    "a kind nobody knows": (nothing, [*RTN, "--strict", "dampin"], ["did you mean 'damping'"]),
    "a size that is none": (nothing, [*RTN, "--shard-size", "nan"], ["--shard-size nan"]),
    "a variable that is not set": (nothing, [*RTN, "--stats", ""], ["an empty value follows --stats"]),
    "a value left out": (nothing, [*RTN, "--work="], ["an empty value follows --work"]),
    "a type that is a path": (nothing, ["gguf", "MODEL", "--type", "/dev/null"], ["type = '/dev/null'"]),
    "more windows than can be": (nothing, [*GPTQ, "--samples", str(10**400)], ["samples = "]),
    "no windows": (nothing, ["calib", "pack", "MODEL", "--samples", "0"], ["samples = 0"]),
    "windows too long": (
        nothing,
        [*GPTQ, "--length", str(1 << 24)],  # more than any disk holds
        ["longer than the model's 512 positions"],
    ),
    "work in the output": (nothing, [*RTN, "--work", "OUT/work"], ["--work", "is in the output directory"]),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_headers_tell_is_refused_at_once(name, main, model, tmp_path, capsys):
    spoil, command, words = EARLY[name]
    spoil(model)
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out.safetensors"  # a name that `calib pack` takes too
    places = {"MODEL": model, "GONE": tmp_path / "gone", "RECIPE": tmp_path / "recipe.yaml", "OUT/work": out / "work"}
    begin = time.process_time()
    target = [] if command[0] == "eval" else ["-o", out]
    code = main(*(places.get(item, item) for item in command), *target)
    assert time.process_time() - begin < 2
    one_line(capsys, words)
    assert code == 2
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_no_bit_of_a_header_flips_unnoticed(step, model, tmp_path):
    """Refused by name of the file, or nothing that is planned has changed: the metadata does not matter to a plan."""
    file, made = model / WEIGHTS, parse({"steps": [{"method": "rtn", "bits": 4}]})

    def planned():
        plan = make_plan(made, model, Options(out=tmp_path / "out"))
        return {tensor.name: tensor for tensor in plan.tensors}, [len(layer) for layer in plan.layers], plan.estimate

    with file.open("rb") as handle:
        end = 8 + struct.unpack("<Q", handle.read(8))[0]
        handle.seek(0)
        whole = handle.read(end)
    intact, unnoticed, refusals = planned(), [], []
    with file.open("r+b", buffering=0) as handle:
        for place in range(0, end, step):
            bits = range(place % 2, 8, 2) if step == 1 else [place % 8]
            for bit in bits:
                handle.seek(place)
                handle.write(bytes([whole[place] ^ 1 << bit]))
                try:
                    found = planned()
                except CheckpointError as error:
                    refusals.append(error.message)
                else:
                    unnoticed.append(found)
            handle.seek(place)
            handle.write(whole[place : place + 1])
    assert all(found == intact for found in unnoticed)
    assert all(str(model) in message for message in refusals)
    assert len(unnoticed) < 0.02 * len(refusals)


ODD = {"architectures": {"x": 1}, "_name_or_path": "\ud800\n\x1b[2J", "torch_dtype": 3, "transformers_version": None}


def test_what_does_not_matter_does_not_hurt(main, model, tmp_path, capsys):
    config(**ODD)(model)
    assert main("rtn", model, "-o", tmp_path / "out", "--bits", "4", "-q") == 0
    for arguments in (["--tensors"], ["--json"]):
        assert main("inspect", model, *arguments) == 0
    config(architectures="x", quantization_config={"config_groups": {"a": 1, "b": {"weights": 3}}})(model)
    assert main("inspect", model) == 0
    assert "\x1b" not in capsys.readouterr().out


def not_finite(name, value):
    def spoil(model):
        from safetensors.torch import load_file, save_file

        tensors = load_file(model / WEIGHTS)
        tensors[name].view(-1)[5] = float(value)
        save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})

    return spoil


@pytest.mark.parametrize(
    ("command", "tensor", "value"),
    [
        (["rtn", "--bits", "4"], "model.layers.2.mlp.up_proj.weight", "nan"),
        (["rtn", "--bits", "4"], "model.layers.0.input_layernorm.weight", "inf"),
        (["rtn", "--bits", "4"], "model.embed_tokens.weight", "-inf"),
        (["gptq", *SHORT], "model.layers.1.input_layernorm.weight", "nan"),
    ],
)
def test_weights_that_are_not_finite_end_a_run_and_keep_what_was_done(
    command, tensor, value, main, model, tmp_path, capsys
):
    not_finite(tensor, value)(model)
    assert main(command[0], model, "-o", tmp_path / "out", *command[1:], "-q") == 1
    one_line(capsys, [WEIGHTS, tensor, "not finite"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.work"]
    assert (tmp_path / "out.work" / "plan.json").exists()


def lose_tokenizer(model):
    for file in model.glob("tokenizer*"):
        file.unlink()


# what a run finds before it begins: how model and text are spoilt, what is given as calibration, words
TEXTS = {
    "no tokenizer": (lose_tokenizer, "default", ["model", "has no tokenizer"]),
    "a damaged tokenizer": (write("tokenizer.json", '{"model": 3}'), "default", ["model", "no usable tokenizer"]),
    "an empty tokenizer": (write("tokenizer.json", b""), "default", ["model", "no usable tokenizer"]),
    "an empty text": (write("../text.txt", " \n"), "text.txt", ["text.txt", "holds no text"]),
    "a short text": (write("../text.txt", "Too short."), "text.txt", ["text.txt", "2 were asked for"]),
    "bytes that are no text": (
        write("../text.txt", b"Tee \xff"),
        "text.txt",
        ["text.txt", "not valid UTF-8 at byte 4"],
    ),
    "a row that is none": (write("../rows.jsonl", '{"text": "a"}\n{'), "rows.jsonl", ["rows.jsonl line 2", "not JSON"]),
    "rows without end": (write("../rows.jsonl", "[" * 100_000), "rows.jsonl", ["rows.jsonl line 1", "not JSON"]),
    "half a character": (
        write("../rows.jsonl", r'{"text": "\ud800"}'),
        "rows.jsonl",
        ["rows.jsonl line 1", "surrogate"],
    ),
    "damaged ids": (
        write("../ids.safetensors", b"\0" * 20),
        "ids.safetensors",
        ["ids.safetensors", "safetensors file"],
    ),
    "no text": (nothing, "text.txt", ["text.txt"]),
    "no vocabulary": (config(vocab_size=None), "default", ["config.json", "vocab_size"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_cannot_be_calibrated_on_is_refused_before_the_first_layer(name, main, model, tmp_path, capsys):
    spoil, source, words = TEXTS[name]
    spoil(model)
    before = sorted(tmp_path.rglob("*"))
    source = tmp_path / source if "." in source else source
    assert main("gptq", model, "-o", tmp_path / "out", "--calibration", source, *SHORT) == 2
    one_line(capsys, words)
    assert sorted(tmp_path.rglob("*")) == before


# -- where to write -------------------------------------------------------------------------------------------------


def test_an_output_that_exists_stays_as_it_is(main, model, tmp_path, capsys):
    for make in (Path.mkdir, Path.touch):
        out = tmp_path / make.__name__
        make(out)
        assert main("rtn", model, "-o", out) == 2
        one_line(capsys, [str(out), "already exists"])
        assert main("rtn", model, "-o", out, "--work", tmp_path / "work", "--overwrite") in (0, 2)
        capsys.readouterr()
        assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("option", ["-o", "--work"])
@pytest.mark.parametrize(
    ("place", "words"),
    [("file/out", "is not a directory"), ("dangling/out", "is not a directory"), (f"{'x' * 300}/out", "too long")],
)
def test_what_cannot_be_created_is_refused_before_anything_is_read(option, place, words, main, model, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    given = {"-o": tmp_path / "out", option: tmp_path / place}
    assert main("rtn", model, *(word for pair in given.items() for word in pair)) == 2
    one_line(capsys, ["cannot be created", words])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "model"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_may_not_be_written_to_is_refused(main, model, tmp_path, capsys):
    (tmp_path / "theirs").mkdir(mode=0o555)
    assert main("rtn", model, "-o", tmp_path / "theirs" / "out") == 2
    one_line(capsys, ["theirs is not writable"])


def test_a_place_on_a_read_only_system_is_refused(main, model, capsys):
    place = next(
        (p for p in (Path("/sys/kernel"), Path("/proc/sys")) if p.is_dir() and not os.access(p, os.W_OK)), None
    )
    if place is None:
        pytest.skip("nothing here is mounted read-only")
    assert main("rtn", model, "-o", place / "out") == 2
    one_line(capsys, [f"{place} is not writable"])


@pytest.mark.parametrize("place", [".", "..", "/"])
def test_a_place_without_a_name_is_none(place, main, model, capsys, monkeypatch):
    monkeypatch.chdir(model)
    assert main("rtn", ".", "-o", place, "--overwrite") == 2
    one_line(capsys, [f"{place} is not a name"])


def test_a_model_is_not_replaced_by_its_own_result(main, model, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")  # which makes the folder above look like a model
    assert main("rtn", model, "-o", tmp_path, "--overwrite") == 2
    one_line(capsys, ["is the model itself, or holds it"])


def test_a_model_may_be_named_by_a_dot(main, model, tmp_path, monkeypatch):
    monkeypatch.chdir(model)
    assert main("rtn", ".", "--bits", "4", "-q") == 0
    assert (tmp_path / "model-rtn-w4" / "config.json").exists()


# -- a full disk ----------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_a_run_that_then_goes_on(main, tiny_model_dir, tmp_path, capsys):
    """A limit on the size of files fails writes in the middle, as a full disk does, and for root too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    command = ["gptq", tiny_model_dir, *SHORT, "-q", "-o"]
    for limit, words in (
        (10_000, ["hidden"]),  # what enters the first layer
        (300_000, ["section"]),  # the first finished layer
        (1_500_000, ["out.partial/files/model.safetensors cannot be written"]),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            code = main(*command, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        one_line(capsys, ["File too large", *words])
        assert code == 1
        assert [path.name for path in tmp_path.iterdir()] == ["out.work"]
    assert main(*command, tmp_path / "out") == 0
    assert main(*command, tmp_path / "whole") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


INSTEAD = {
    "quantize": (["quantize", "model"], "llmcompress gptq MODEL"),
    "help": (["help", "gptq"], "llmcompress gptq --help"),
    "skip": (["gptq", "model", "--skip", "lm_head"], "--set 'PATTERN: {skip: true}'"),
    "keep-head": (["rtn", "model", "--keep-head"], "--head-bits"),
    "half bits": (["gptq", "model", "--bits", "4.5"], "--bpw of gptq"),
    "percent": (["wanda", "model", "--sparsity", "50"], "such as 0.5"),
    "ollama": (["gptq", "model", "--target", "ollama"], "gguf MODEL --modelfile"),
    "tgi": (["gptq", "model", "--target", "tgi"], "--target vllm"),
    "missing": (["gptq", "modle"], "did you mean model?"),
    "missing elsewhere": (["gptq", "/no/such"], "/no/such does not exist"),
    "hub": (["gptq", "some-owner/model"], "takes no hub ids"),
    "a file": (["inspect", "notes.txt"], "or a .gguf file"),
    "a file in place of codes": (["export", "notes.txt", "--format", "gptq"], "notes.txt is a file"),
    "nothing to verify": (["verify", "out"], "out does not exist"),
    "nothing to verify against": (["verify", "model", "--source", "modle"], "modle does not exist"),
    "an adapter of nothing": (["verify", "model", "--adapter", "model"], "merged into the source, and none is given"),
    "no text": (["gguf", "model", "--type", "Q4_0", "--samples", "8"], "--samples is about a calibration text"),
    "no tokenizer": (["gptq", "wordless"], "wordless has no tokenizer"),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_others_type_is_answered_with_what_to_type(main, capsys, tiny_model_dir, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_dir, "model")
    shutil.copytree(tiny_model_dir, "wordless", ignore=shutil.ignore_patterns("tokenizer*"))
    Path("notes.txt").write_text("about it")
    command, words = INSTEAD[name]
    assert main(*command) == 2
    one_line(capsys, [words])


def test_windows_are_written_over_windows_alone(model, main, capsys):
    pack = ("calib", "pack", model, "--samples", 2, "--length", 16, "-o")
    before, ids = (model / WEIGHTS).read_bytes(), model.with_name("ids.safetensors")
    assert main(*pack, model / WEIGHTS) == 2
    one_line(capsys, ["model.safetensors already exists"])
    assert main(*pack, model / WEIGHTS, "--overwrite") == 2
    one_line(capsys, ["does not hold packed token ids"])
    assert (model / WEIGHTS).read_bytes() == before
    assert [main(*pack, ids), main(*pack, ids), main(*pack, ids, "--overwrite")] == [0, 2, 0]


def test_an_original_is_not_replaced_by_what_is_recovered(model, main, capsys, tmp_path):
    assert main("rtn", model, "--bits", 4, "--group-size", 64, "-o", tmp_path / "out") == 0
    capsys.readouterr()
    text = ("--samples", 32, "--length", 16)
    assert main("recover", tmp_path / "out", "--ref", model, "-o", model, "--overwrite", *text) == 2
    one_line(capsys, ["is the model itself"])
    assert not (model / "report.json").exists()


@pytest.mark.parametrize("place", ["out/kept", "out.work/kept", "file"])
def test_statistics_are_kept_apart_from_what_a_run_writes(place, model, main, capsys, tmp_path):
    (tmp_path / "file").write_text("no directory")
    asked = ("gptq", model, *SHORT, "-o", tmp_path / "out", "--stats", tmp_path / place)
    for words in (("plan", *asked), asked):
        assert main(*words) == 2
        one_line(capsys, ["--stats", place.rpartition("/")[2]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


def test_times_are_refused_by_a_plan_too(model, main, capsys, tmp_path):
    asked = ("gptq", model, *SHORT, "-o", tmp_path / "out", "--timings", tmp_path / "out.work" / "times.jsonl")
    assert main(*asked, "--dry-run") == main(*asked) == 2
    assert "holds no times" in capsys.readouterr().err


def test_a_sweep_reads_the_text_it_evaluates_on_before_it_compresses(model, main, capsys, tmp_path):
    recipe = tmp_path / "rtn.yaml"
    recipe.write_text("steps: [{method: rtn, group_size: 64}]\noutput: {format: dense}\n")
    assert main("sweep", recipe, model, "--bits", 4, "-o", tmp_path / "all", "--evaluate", tmp_path / "no.txt") == 2
    one_line(capsys, ["no.txt"])
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("option", ["--eval-length", "--eval-windows", "--ref-cache"])
def test_a_sweep_that_evaluates_nothing_takes_no_option_of_it(option, model, main, capsys, tmp_path):
    assert main("sweep", "rtn", model, "--bits", "4,8", "-o", tmp_path / "all", option, 64) == 2
    one_line(capsys, [f"{option} is for what is evaluated"])


def test_windows_longer_than_the_text_are_refused(model, main, capsys):
    config(max_position_embeddings=100_000)(model)
    assert main("eval", model, "--length", 90_000) == 2
    one_line(capsys, ["90000"])


def test_windows_longer_than_the_models_positions_are_refused(model, main, capsys):
    config(max_position_embeddings=64)(model)
    assert main("eval", model, "--length", 65, "--windows", 2) == 2
    one_line(capsys, ["65 tokens", "64 positions", "--length 64"])


def test_a_text_whose_tokens_the_model_lacks_is_refused(model, main, capsys):
    config(vocab_size=600)(model)
    assert main("eval", model, "--length", 16, "--windows", 2) == 2
    one_line(capsys, ["has 600 tokens"])


def test_figures_have_a_place_before_they_are_measured(model, main, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main("eval", model, "--length", 16, "--windows", 2, "--output", tmp_path / "file" / "x.json") == 2
    one_line(capsys, ["file"])


def test_patterns_that_are_said_again_come_last_beside_what_was_said(model):
    said = ["mlp.*: {bits: 8}", "layers.*: {bits: 3}", "mlp.*: {group_size: 32}"]
    assert list(parse_set(said).items()) == [("layers.*", {"bits": 3}), ("mlp.*", {"bits": 8, "group_size": 32})]
