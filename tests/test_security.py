"""What a stranger's model cannot do: run code, reach a network, or choose which files of this machine are read."""

import ast
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmcompress.engine.source.text_tokenizer import load_tokenizer
from llmcompress.errors import CheckpointError, LlmcompressError
from llmcompress.store.headers import read_headers
from llmcompress.validate.stored import DamageError, read_tensors

SOURCE = Path(__file__).parents[1] / "src" / "llmcompress"
COMMAND = [sys.executable, "-m", "llmcompress"]
SMALL = ["--bits", "4", "--group-size", "64", "--samples", "2", "--length", "16"]


def call(*arguments, **options):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, **options)


@pytest.fixture
def model(tiny_model_dir, tmp_path):
    """A copy of the tiny model."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


# -- no code out of data --------------------------------------------------------------------------------------------

MODULES = {
    "pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess", "socket",
    "socketserver", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc",
    "code", "codeop", "pty",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "torch": {"load", "hub", "compile"},
    "np": {"load"},
    "numpy": {"load"},
    "os": {"system", "popen", "fork", "forkpty", "startfile", "posix_spawn", "posix_spawnp"},
    "yaml": {"load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "Loader", "UnsafeLoader"},
}


def offences(code):
    """(line, what) of everything in a source text that could run what it reads, or leave the process."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in named if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            running = owner == "os" and node.attr.startswith(("exec", "spawn"))
            if node.attr in METHODS.get(owner, ()) or running or "pickle" in node.attr:
                yield node.lineno, f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            owner, given = node.func.value, {word.arg: word.value for word in node.keywords}
            loader = given.get("Loader")
            if (
                isinstance(owner, ast.Name)
                and owner.id == "yaml"
                and not (isinstance(loader, ast.Name) and loader.id == "_Loader")
            ):
                yield node.lineno, "yaml.load"
        if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle", "weights_only"):
            yield node.value.lineno, node.arg


# nvcc, where NVRTC is missing: it is given sources of our own, and no shell is between
ALLOWED = {"kernels/compilers.py": ["subprocess"], "isolation.py": ["os.fork"]}


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_runs_what_it_reads(file):
    found = [what for _, what in offences(file.read_text())]
    assert found == ALLOWED.get(str(file.relative_to(SOURCE)), [])


def test_offences_are_seen():
    lines = [
        "import pickle", "from pickle import load", "import torch.nn, dill", "torch.load(x)", "np.load(x)", "eval(x)",
        "run = exec", "yaml.load(x)", "yaml.load(x, Loader=yaml.FullLoader)", "yaml.unsafe_load(x)", "os.system(x)",
        "os.execv(x)", "import subprocess as s", "pandas.read_pickle(x)", "f(x, allow_pickle=True)", "import socket",
    ]  # fmt: skip
    for line in lines:
        assert list(offences(line)), line
    for line in ("model.eval()", "re.compile(x)", "json.load(x)", "yaml.safe_load(x)", "yaml.load(x, Loader=_Loader)"):
        assert not list(offences(line)), line


def test_the_one_yaml_loader_is_a_safe_one():
    from llmcompress import yamlfile

    assert yamlfile._Loader in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", None))


# -- no network -----------------------------------------------------------------------------------------------------


def test_the_tests_themselves_have_no_network():
    code = (
        "import socket\n"
        "for call in (lambda: socket.create_connection(('127.0.0.1', 9)), lambda: socket.getaddrinfo('localhost', 9),\n"
        "             lambda: socket.socket().bind(('127.0.0.1', 0))):\n"
        "    try: call()\n"
        "    except OSError as error: assert 'a test asked for the network' in str(error), error\n"
        "    else: raise SystemExit('there is a network')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(OSError, match="a test asked for the network"):
        socket.create_connection(("127.0.0.1", 9))


LISTENING = """
import sys
seen = []
def hook(event, arguments):
    if event.startswith("socket."):
        # AF_UNIX sockets would be no offence (they lead to no other machine), but there are none either
        seen.append((event, repr(arguments)[:200]))
sys.addaudithook(hook)
from llmcompress.cli import app
try:
    app.main()
except SystemExit as end:
    assert not end.code, end.code
if seen:
    sys.exit(f"{len(seen)} events: {seen[:5]}")
"""


def test_a_whole_run_touches_no_socket(tiny_model_dir, tmp_path):
    (tmp_path / "text.txt").write_text("The kettle sang. " * 200)
    arguments = ["gptq", tiny_model_dir, "-o", tmp_path / "out", "--calibration", tmp_path / "text.txt", *SMALL]
    kept = [part for part in os.environ["PYTHONPATH"].split(os.pathsep) if Path(part).name != "offline"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}
    del environment["HF_HUB_OFFLINE"]  # the command sets it itself
    done = subprocess.run(
        [sys.executable, "-c", LISTENING, *map(str, arguments)],
        env=environment,  # without the hook that refuses, which would end attempts early
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


# -- no files from elsewhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
             "LICENSE", "README.md", "modeling_x.py", "model.safetensors", "additional_chat_templates/x.jinja"],
)  # fmt: skip
def test_no_file_of_a_model_is_a_link_to_elsewhere(name, model, tmp_path):
    outside = tmp_path / "outside"
    (model / name).parent.mkdir(exist_ok=True)
    if (model / name).exists():
        (model / name).rename(outside)
    else:
        outside.write_text("secret")
    (model / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link that leaves the model directory") as caught:
        read_headers(model)
    assert name in caught.value.message
    if name.startswith("tokenizer"):
        with pytest.raises(CheckpointError, match="is a link that leaves the model directory"):
            load_tokenizer(model)
    if name == "model.safetensors":
        with pytest.raises(DamageError, match="is a link that leaves its directory"):
            read_tensors(model)


def test_a_folder_of_templates_is_no_link_either(model, tmp_path):
    (tmp_path / "templates").mkdir()
    (model / "additional_chat_templates").symlink_to(tmp_path / "templates")
    with pytest.raises(CheckpointError, match="additional_chat_templates is a link that leaves"):
        read_headers(model)


def test_links_that_nothing_reads_are_nobodys_business(model, tmp_path):
    (model / "notes.md").symlink_to(tmp_path)
    (model / "onnx").symlink_to(tmp_path)
    assert read_headers(model).tensors


def test_a_download_cache_is_made_of_links(main, model, tmp_path):
    """models--org--name/snapshots/<commit>/<file> -> ../../blobs/<hash>: all of it is read, by every reader."""
    cache = tmp_path / "hub" / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(cache / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    headers = read_headers(snapshot)
    assert set(read_tensors(snapshot)) == set(headers.tensors)
    assert load_tokenizer(snapshot)("a")["input_ids"]
    assert main("rtn", snapshot, "-o", tmp_path / "out", "--bits", "4", "-q") == 0
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("target", ["../../../models--org--other/blobs/0", "../../refs/main"])
def test_a_cache_is_no_way_into_another(target, model, tmp_path):
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123abc"
    shutil.copytree(model, snapshot)
    other = snapshot / target
    other.parent.mkdir(parents=True)
    (snapshot / "tokenizer.json").rename(other)
    (snapshot / "tokenizer.json").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link that leaves"):
        read_headers(snapshot)


def test_a_folder_that_is_merely_called_snapshots_is_no_cache(model, tmp_path):
    snapshot = tmp_path / "mine" / "snapshots" / "0123abc"
    shutil.copytree(model, snapshot)
    (tmp_path / "mine" / "blobs").mkdir()
    (snapshot / "tokenizer.json").rename(tmp_path / "mine" / "blobs" / "0")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link that leaves"):
        read_headers(snapshot)


# -- permissions ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o022, 0o077, 0o000])
def written(request, main, tiny_model_dir, tmp_path):
    """(umask, the files and directories that a run and `calib pack` leave under it)."""
    before = os.umask(request.param)
    try:
        assert main("rtn", tiny_model_dir, "-o", tmp_path / "deep" / "out", "--bits", "4", "--keep-work", "-q") == 0
        assert main("calib", "pack", tiny_model_dir, "-o", tmp_path / "deep" / "ids.safetensors", *SMALL[4:]) == 0
    finally:
        os.umask(before)
    return request.param, [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]


def permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_has_the_permissions_of_the_umask_and_is_for_nobody_else_to_change(written):
    umask, paths = written
    assert len(paths) > 15
    for path in paths:
        if not path.name.startswith("section-"):
            assert permissions(path) == (0o777 if path.is_dir() else 0o666) & ~umask & ~0o002, path


def test_finished_sections_have_the_permissions_of_the_umask(written):
    umask, paths = written
    assert {permissions(path) for path in paths if path.name.startswith("section-")} == {0o666 & ~umask & ~0o002}


# -- no code out of a checkpoint ------------------------------------------------------------------------------------

EVIL = """
import os, pathlib
pathlib.Path(os.environ["MARKER"]).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "evil"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
def generate(*args, **kwargs):
    raise RuntimeError
"""


def infect(model, model_type):
    """Name the directory's own code wherever a checkpoint can."""
    (model / "evil.py").write_text(EVIL)
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(EVIL)
    names = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    for file, changes in (
        ("config.json", {"model_type": model_type, "auto_map": names, "attn_implementation": "evil/kernel"}),
        ("tokenizer_config.json", {"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": [None, "evil.Tokens"]}}),
        ("generation_config.json", {"custom_generate": "."}),
    ):
        data = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({**data, **changes}))


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_no_command_runs_the_code_of_a_checkpoint(model_type, model, tiny_model_dir, tmp_path, main, monkeypatch):
    clean = tmp_path / "clean"
    assert main("rtn", tiny_model_dir, "-o", clean, "--bits", "4", "--keep-work", "-q") == 0
    work = Path(f"{clean}.work")
    place = json.loads((work / "place.json").read_text())
    (work / "place.json").write_text(json.dumps({**place, "model": str(model)}))
    infected = Path(shutil.copytree(clean, tmp_path / "infected"))
    infect(infected, model_type)
    infect(model, model_type)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: [{method: gptq}]")
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    out = tmp_path / "out"
    short = ["--samples", "2", "--length", "16"]
    refused = [
        ["gptq", model, "-o", out, *short],
        ["rtn", model, "-o", out],
        ["gptq", model, "-o", out, "--calibration", "self", *short],
        ["plan", "gptq", model, "-o", out],
        ["plan", "run", recipe, model, "-o", out],
        ["run", recipe, model, "-o", out],
        ["export", work, "--format", "gptq", "-o", out],
    ]
    for arguments in refused:
        assert main(*arguments) == 2, arguments
    for arguments in (
        ["eval", model, "--length", "16", "--windows", "1"],
        ["eval", infected, "--ref", model, "--length", "16", "--windows", "1", "--generate", "x"],
        ["calib", "pack", model, "-o", tmp_path / "ids.safetensors", *short],
        ["calib", "pack", model, "-o", tmp_path / "ids2.safetensors", "--calibration", "self", *short],
        ["inspect", model, "--tensors"],
        ["inspect", infected],
        ["verify", infected, "--source", model],
    ):
        assert main(*arguments) in (0, 2, 3), arguments
        assert not (tmp_path / "marker").exists(), arguments
    assert not out.exists()


def test_with_the_flag_it_does(model, tmp_path):
    """So the test above looks at the right place."""
    infect(model, "evil")
    marker = tmp_path / "marker"
    environment = {**os.environ, "MARKER": str(marker), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    call("calib", "pack", model, "-o", tmp_path / "ids.safetensors", *SMALL[4:], "--trust-remote-code", env=environment)
    assert marker.exists()


def test_a_kernel_of_a_hub_is_not_what_a_config_may_ask_for(model):
    from llmcompress.model.skeleton import load_config

    data = json.loads((model / "config.json").read_text())
    for key in ("attn_implementation", "_attn_implementation"):
        (model / "config.json").write_text(json.dumps({**data, key: "evil/kernel"}))
        assert load_config(model)._attn_implementation is None


def test_an_adapter_does_not_lead_to_another_model(model, tmp_path):
    from llmcompress.engine.run.tokens import tokens_for
    from llmcompress.recipe import Calibration

    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "elsewhere")}))
    with pytest.raises(LlmcompressError, match="holds an adapter"):
        tokens_for(Calibration(source="self", samples=2, length=16), model, "float32")
