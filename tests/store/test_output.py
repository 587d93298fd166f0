"""Outputs appear whole or not at all, hold exactly the announced bytes, and are read by safetensors itself."""

import hashlib
import json
import os
import stat
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from llmcompress.errors import CheckpointError, PlanError, RunError
from llmcompress.formats.base import TensorSpec
from llmcompress.store.checkpoint import DTYPES
from llmcompress.store.headers import INDEX
from llmcompress.store.output import OutputDirectory
from llmcompress.store.weight_files import shards, weights_nbytes


def spec_of(name, tensor):
    return TensorSpec(name, next(key for key, dtype in DTYPES.items() if dtype == tensor.dtype), tuple(tensor.shape))


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "a.weight": torch.randn(3, 3, generator=generator).to(torch.float16),
        "a.shape": torch.tensor([3, 3]),
        "c.qweight": torch.randint(-(2**31), 2**31, (4, 6), generator=generator, dtype=torch.int64).to(torch.int32),
        "d": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }


def write(path, tensors, shard_bytes=5_000_000_000, **options):
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    with OutputDirectory(path, **options) as out:
        hashes = out.write_weights(specs, iter(tensors.items()), shard_bytes)
        out.write_json("config.json", {"model_type": "llama"})
        out.commit()
    return specs, hashes


def weight_files(path):
    return sorted(file for file in path.iterdir() if file.suffix == ".safetensors" or file.name == INDEX)


def test_one_file_as_safetensors_reads_it(tmp_path):
    tensors = some_tensors()
    specs, hashes = write(tmp_path / "out", tensors)
    assert [file.name for file in weight_files(tmp_path / "out")] == ["model.safetensors"]
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == tensors.keys() == hashes.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
        assert hashes[name] == hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert weights_nbytes(specs) == (tmp_path / "out" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("shard_bytes", [1, 60, 100, 150])
def test_shards_with_their_index(tmp_path, shard_bytes):
    tensors = some_tensors()
    specs, _ = write(tmp_path / "out", tensors, shard_bytes)
    files = weight_files(tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in specs)
    assert index["weight_map"].keys() == tensors.keys()
    count = len(files) - 1
    assert count > 1
    assert {file.name for file in files} == {INDEX} | {
        f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)
    }
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])
    for shard in shards(specs, shard_bytes):
        held = [spec.nbytes for spec in specs if spec.name in shard.begins]
        assert len(held) == 1 or sum(held) <= shard_bytes
    assert weights_nbytes(specs, shard_bytes) == sum(file.stat().st_size for file in files)


tensors_of_any_kind = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6
)


@settings(max_examples=50, deadline=None)
@given(kinds=tensors_of_any_kind, shard_bytes=st.integers(1, 400), seed=st.integers(0, 99))
def test_any_mix_of_types_is_read_back_and_announced_to_the_byte(tmp_path_factory, kinds, shard_bytes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number, (dtype, shape) in enumerate(kinds):
        wide = torch.randint(0, 2, tuple(shape), generator=generator)
        tensors[f"t{number}"] = wide.to(DTYPES[dtype])
    path = tmp_path_factory.mktemp("any") / "out"
    specs, _ = write(path, tensors, shard_bytes)
    assert weights_nbytes(specs, shard_bytes) == sum(file.stat().st_size for file in weight_files(path))
    read = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].to(torch.float64), tensor.to(torch.float64))
    for shard in shards(specs, shard_bytes):
        assert all(shard.begins[s.name] % (s.nbytes // max(1, tensors[s.name].numel()) or 1) == 0
                   for s in specs if s.name in shard.begins)  # fmt: skip


def test_only_one_tensor_is_alive_at_a_time(tmp_path):
    alive: list[weakref.ref] = []
    specs = [TensorSpec(f"t{number}", "F32", (8, 8)) for number in range(20)]

    def streamed():
        for spec in specs:
            assert not any(reference() is not None for reference in alive)
            tensor = torch.ones(8, 8)
            alive.append(weakref.ref(tensor))
            yield spec.name, tensor
            del tensor

    with OutputDirectory(tmp_path / "out") as out:
        out.write_weights(specs, streamed(), 1000)
    assert len(alive) == 20


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ([("a", torch.ones(2, 2))], "tensor b was expected and nothing came"),
        ([("b", torch.ones(3)), ("a", torch.ones(2, 2))], "tensor a was expected and b came"),
        ([("a", torch.ones(2, 2)), ("b", torch.ones(4))], r"tensor b is F32 \[4\], announced was F32 \[3\]"),
        ([("a", torch.ones(2, 2).half())], "tensor a is F16"),
        ([("a", torch.ones(2, 2)), ("b", torch.ones(3)), ("c", torch.ones(3))], "tensor c came after"),
    ],
)
def test_tensors_that_were_not_announced_stop_the_run_and_leave_nothing(tmp_path, given_, message):
    specs = [TensorSpec("a", "F32", (2, 2)), TensorSpec("b", "F32", (3,))]
    with pytest.raises(RunError, match=message), OutputDirectory(tmp_path / "out") as out:
        out.write_weights(specs, iter(given_))
    assert list(tmp_path.iterdir()) == []


def test_a_name_announced_twice_is_refused():
    with pytest.raises(RunError, match="a would be written twice"):
        shards([TensorSpec("a", "F32", (1,)), TensorSpec("a", "F16", (1,))])


def test_nothing_is_there_before_the_commit_and_nothing_after_a_failure(tmp_path):
    path = tmp_path / "deep" / "out"

    def fail_halfway():
        with OutputDirectory(path) as out:
            out.write_text("README.md", "text")
            assert not path.exists()
            assert (tmp_path / "deep" / "out.partial" / "files" / "README.md").exists()
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []
    with OutputDirectory(path):
        pass  # no commit
    assert not path.exists()


def test_what_a_killed_run_left_is_cleared_and_what_others_made_is_not(tmp_path):
    killed = OutputDirectory(tmp_path / "out")
    killed.__enter__()
    killed.write_text("half", "of it")
    killed.claim.close()
    write(tmp_path / "out", some_tensors())
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "precious").touch()
    with pytest.raises(PlanError, match="was not made by a run"), OutputDirectory(tmp_path / "other"):
        pass
    assert (tmp_path / "other.partial" / "precious").exists()


def test_an_existing_output_is_kept_until_a_complete_one_replaces_it(tmp_path):
    tensors = some_tensors()
    write(tmp_path / "out", tensors)
    (tmp_path / "out" / "old").touch()
    with pytest.raises(PlanError, match="already exists"):
        OutputDirectory(tmp_path / "out")
    with pytest.raises(ZeroDivisionError), OutputDirectory(tmp_path / "out", overwrite=True):
        _ = 1 / 0
    assert (tmp_path / "out" / "old").exists()
    write(tmp_path / "out", tensors, overwrite=True)
    assert not (tmp_path / "out" / "old").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_overwriting_is_for_models_only(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("home", "file", "link", "broken"):
        with pytest.raises(PlanError):
            OutputDirectory(tmp_path / name)
        with pytest.raises(PlanError, match="not overwritten"):
            OutputDirectory(tmp_path / name, overwrite=True)
    assert (tmp_path / "home" / "letters").exists()


def test_an_output_that_appeared_meanwhile_is_not_replaced(tmp_path):
    with OutputDirectory(tmp_path / "out") as out:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
        with pytest.raises(PlanError, match="already exists"):
            out.commit()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["theirs"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0o000])
def test_permissions_are_those_of_the_umask_and_nothing_is_for_everybody_to_change(tmp_path, umask):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer.json").chmod(0o400)
    before = os.umask(umask)
    try:
        with OutputDirectory(tmp_path / "deep" / "out") as out:
            out.write_weights([TensorSpec("a", "F32", (1,))], iter([("a", torch.ones(1))]))
            out.copy_side_files(source)
            out.write_json("config.json", {})
            out.commit()
    finally:
        os.umask(before)
    for path in (tmp_path / "deep", *(tmp_path / "deep").rglob("*")):
        most = 0o775 if path.is_dir() else 0o664
        assert stat.S_IMODE(path.stat().st_mode) == most & ~umask, path


def make_source(path):
    path.mkdir()
    copied = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}),
        "preprocessor_config.json": json.dumps({"auto_map": {"AutoImageProcessor": "images_x.X"}}),
        "video_preprocessor_config.json": json.dumps({"auto_map": {"AutoVideoProcessor": "videos_x.X"}}),
        "images_x.py": "pass",
        "videos_x.py": "pass",
        "merges.txt": "a b",
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
        "generation_config.json": '{"temperature": 0.5}',
        "LICENSE": "licence",
        "NOTICE.txt": "notice",
        "modeling_x.py": "from .layers_x import Layer\nfrom . import deep_x\n",
        "layers_x.py": "import os\n",
        "deep_x.py": "from .missing_x import gone\n",
        "tokenization_x.py": "this is (not python",
    }
    left = {
        "config.json": json.dumps(
            {"auto_map": {"AutoModel": "modeling_x.XModel", "AutoConfig": "other/repo--far_x.X"}}
        ),
        "model.safetensors": "weights",
        "model.safetensors.index.json": "{}",
        "pytorch_model.bin": "weights",
        "consolidated.00.pth": "weights",
        "model.gguf": "weights",
        "original/params.json": "{}",
        "README.md": "readme",
        "train.py": "pass",
        "far_x.py": "pass",
        "quantize_config.json": "{}",
    }
    for name, text in {**copied, **left}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return copied


def test_side_files_are_copied_byte_for_byte_and_weights_never(tmp_path):
    copied = make_source(tmp_path / "source")
    with OutputDirectory(tmp_path / "out") as out:
        assert out.copy_side_files(tmp_path / "source") == sorted(copied)
        out.commit()
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert found == copied.keys()
    for name, text in copied.items():
        assert (tmp_path / "out" / name).read_text() == text


def test_links_of_a_hub_cache_become_files_and_links_elsewhere_are_refused(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "abc").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    with OutputDirectory(tmp_path / "out") as out:
        out.copy_side_files(snapshot)
        out.commit()
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    (tmp_path / "secret").write_text("secret")
    (snapshot / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError), OutputDirectory(tmp_path / "out2") as out:
        out.copy_side_files(snapshot)
    assert not (tmp_path / "out2").exists()


def test_json_keeps_the_order_of_the_source(tmp_path):
    with OutputDirectory(tmp_path / "out") as out:
        out.write_json("config.json", {"z": 1, "a": {"y": [1, 2], "b": None}})
        out.commit()
    text = (tmp_path / "out" / "config.json").read_text()
    assert text == '{\n  "z": 1,\n  "a": {\n    "y": [\n      1,\n      2\n    ],\n    "b": null\n  }\n}\n'
