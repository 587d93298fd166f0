"""Models for tests: a trained one kept in the repository, and random ones of every family made on the fly.

No test reaches a network: `offline/sitecustomize.py` is loaded here, and by every Python that a test starts.
"""

import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that are forked would wait for threads that they do not have

OFFLINE = Path(__file__).parent / "offline"
if not os.environ.get("PYTHONPATH", "").startswith(str(OFFLINE)):  # workers of xdist have it from their start
    runpy.run_path(str(OFFLINE / "sitecustomize.py"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(OFFLINE), os.environ.get("PYTHONPATH"))))

MODELS = Path(__file__).parent / "models"
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}

PROBING = (  # modules that try, in a process of its own, what is done next in this one
    "engine.source.stacked",
    "engine.source.text_tokenizer",
    "formats.gguf.tokenizer",
    "model.observe",
    "model.rehearsal",
    "model.skeleton",
    "model.wrapped",
)
LONGEST = (
    "test_documented_commands.py",
    "test_workflows.py",
    "test_memory.py",
    "test_pass_memory.py",
    "test_models.py",
)
RandomModel = Callable[..., Path]
Main = Callable[..., int]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: a long test that is begun last would run alone, a worker waiting beside it."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _reports_are_as_published() -> Iterator[None]:
    """Every report.json that a test has written in this process follows the published schema."""
    from jsonschema import Draft202012Validator

    from llmcompress.engine.write import publish as write
    from llmcompress.engine.write.report_schema import Report
    from llmcompress.report.schemas import schema_text

    published = Draft202012Validator(json.loads(schema_text("report")))
    report = write.build_report

    def checked(*arguments: Any) -> dict[str, Any]:
        result = report(*arguments)
        said = json.loads(json.dumps(result))
        output = said["recipe"]["output"]
        if (output["shard_size"] or 1_000_000) < 1_000_000:  # smaller than users may ask for: to split tiny files
            output["shard_size"] = None
        published.validate(said)
        Report.model_validate_json(json.dumps(said))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "build_report", checked)
        yield


@pytest.fixture(scope="session", autouse=True)
def _json_is_as_described() -> Iterator[None]:
    """Whatever a command prints with --json in this process follows the schema that `llmcompress schema` has of it."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    from llmcompress.cli import console
    from llmcompress.cli.app import parser
    from llmcompress.cli.log import finite
    from llmcompress.cli.page import schema_name
    from llmcompress.report.schemas import schema_text

    print_json, validators = console.print_json, {}

    def described() -> str:
        """The schema of what the command under way prints."""
        words, command = [], parser()
        for word in sys.argv[1:]:
            command = getattr(command, "commands", {}).get(word)
            if command is None:
                break
            words.append(word)
        return "page" if words == ["report"] else schema_name(words)

    def checked(data: Any) -> None:
        name = described()
        if name not in validators:
            validators[name] = Draft202012Validator(json.loads(schema_text(name)))
        fault = best_match(validators[name].iter_errors(json.loads(json.dumps(finite(data)))))
        if fault is not None:
            said = f"{fault.json_path}: {fault.message[:1000]}"
            pytest.fail(f"what {sys.argv[1:]} prints is not what `schema {name}` says: {said}", pytrace=False)
        print_json(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "print_json", checked)
        yield


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """main(*arguments): the command line in this process, as `llmcompress` runs it; its exit code."""
    import signal

    from llmcompress.cli import app

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["llmcompress", *map(str, arguments)])
        before = signal.getsignal(signal.SIGTERM), dict(os.environ), os.umask(0o077)
        os.umask(before[2])
        try:
            app.main()
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, before[0])
            os.environ.clear()
            os.environ.update(before[1])
            os.umask(before[2])
        return 0

    return run


@pytest.fixture(scope="session", autouse=True)
def _texts_are_encoded_once() -> Iterator[None]:
    """The texts that come with llmcompress are encoded once by a process for each tokenizer that tests have."""
    from llmcompress.calib import default

    encode, encoded = default.token_ids, {}

    def token_ids(tokenizer: Any, documents: Any, *others: Any) -> Any:
        documents = list(documents)
        if not getattr(tokenizer, "is_fast", False):
            return encode(tokenizer, documents, *others)
        key = tokenizer.backend_tokenizer.to_str(), repr(tokenizer), repr(documents), others
        if key not in encoded:
            encoded[key] = list(encode(tokenizer, documents, *others))
        return encoded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "token_ids", token_ids)
        yield


@pytest.fixture(scope="session", autouse=True)
def _what_went_well_is_tried_once() -> Iterator[None]:
    """Work on the same input is tried once in a forked process: forking is a fifth of what a small run takes."""
    from importlib import import_module

    from fingerprints import fingerprint

    done: set[str] = set()

    def once(probe: Callable[..., None]) -> Callable[..., None]:
        def tried(work: Callable[[], object], *others: Any) -> None:
            try:
                key = fingerprint(work)
            except Exception:  # of whatever is no usable config or file
                return probe(work, *others)
            if key not in done:
                probe(work, *others)
                done.add(key)
            return None

        return tried

    with pytest.MonkeyPatch.context() as patch:
        for name in PROBING:
            module = import_module(f"llmcompress.{name}")
            patch.setattr(module, "probe", once(module.probe))
        yield


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    """A trained Llama with tokenizer, chat template and licence (scripts/make_tiny_model.py). Read-only."""
    return MODELS / "tiny-llama"


@pytest.fixture(scope="session")
def shallow_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of that model, as a model: for runs that more layers would only make longer. Read-only."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("models") / tiny_model_dir.name
    shutil.copytree(tiny_model_dir, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}, indent=2) + "\n")
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not re.match(r"model\.layers\.[23]\.", name)}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session")
def tiny_eval_text() -> Path:
    """Text that the tiny model has not seen."""
    return MODELS / "tiny-llama-eval.txt"


@pytest.fixture(scope="session")
def held_out_ids(tiny_model_dir: Path, tiny_eval_text: Path) -> Any:
    """Tokens [n] int64 of that text."""
    import torch
    from transformers import AutoTokenizer

    return torch.tensor(AutoTokenizer.from_pretrained(tiny_model_dir)(tiny_eval_text.read_text())["input_ids"])


@pytest.fixture(scope="session")
def windows(held_out_ids: Any) -> Any:
    """The first of those tokens, in windows [16, 64]."""
    return held_out_ids[: 16 * 64].view(16, 64)


@pytest.fixture(scope="session")
def random_model_dir(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """random_model_dir(family, dtype="bfloat16", shard=None, **config): a saved model with random weights. Read-only.

    family: the name or a model type of a declaration, or any model type that transformers knows. config: values on top
    of the declaration's `tiny` and the common small sizes. shard: largest file, such as "100KB".
    """
    root = tmp_path_factory.mktemp("random-models")
    made: dict[str, Path] = {}

    def make(family: str, dtype: str = "bfloat16", shard: str | None = None, **config: Any) -> Path:
        key = repr((family, dtype, shard, sorted(config.items())))
        if key not in made:
            made[key] = save_random_model(root / f"{family}-{len(made)}", family, dtype, shard, config)
        return made[key]

    return make


def random_config(family: str, **overrides: Any) -> Any:
    """transformers' config of a small model of a family; overrides with a `model_type` are all of it."""
    from transformers import AutoConfig

    if "model_type" in overrides:
        return AutoConfig.for_model(**overrides)

    from llmcompress import arch
    from llmcompress.registry import discover

    spec = arch.find(family) or discover(arch, "ARCH").get(family)
    model_type = family if spec is None or family in spec.model_types else spec.model_types[0]
    known = AutoConfig.for_model(model_type)
    common = {key: value for key, value in COMMON.items() if hasattr(known, key)}
    return AutoConfig.for_model(model_type, **{**common, **(spec.tiny if spec else {}), **overrides})


def save_random_model(path: Path, family: str, dtype: str, shard: str | None, overrides: dict[str, Any]) -> Path:
    """Save a model whose every parameter matters to its output; the global random state is left as it was."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(random_config(family, **overrides), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1 if "emb" in name or "wte" in name else parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)  # norms near 1, biases near 0
        model = model.to(getattr(torch, dtype))
        model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    return path
