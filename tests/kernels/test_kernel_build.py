"""Compiling kernels and keeping them: without a GPU, by the compilers that are here."""

import json
import shutil
import stat
from contextlib import nullcontext

import pytest

import llmcompress.kernels.compilers as compilers
from llmcompress.kernels.build import Builder
from llmcompress.kernels.build_cache import Cache, Made, directory_of
from llmcompress.kernels.compile_errors import CompileError, KernelsError
from llmcompress.kernels.compilers import Nvcc, find_compiler
from llmcompress.kernels.launch import Kernel
from llmcompress.kernels.nvrtc import Nvrtc
from llmcompress.kernels.source import expanded, source_text
from llmcompress.kernels.variants import variants

SCALE = """
extern "C" __global__ void scale(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= FACTOR;
}
"""
ELF_MACHINE_CUDA = 190


def architecture_of(cubin):
    """(machine, compute capability) as the header of an ELF file has them, from the format's own definition."""
    assert cubin[:4] == b"\x7fELF"
    flags = int.from_bytes(cubin[48:52], "little")
    return int.from_bytes(cubin[18:20], "little"), flags


def compiler_or_skip(kind):
    try:
        return kind()
    except KernelsError as error:
        pytest.skip(error.message)


class Counting:
    """A compiler whose cubins say what they were made from."""

    version = "counting 1"

    def __init__(self):
        self.calls = 0

    def __call__(self, text, defines, architecture):
        self.calls += 1
        return json.dumps([text, defines, architecture]).encode()


@pytest.fixture
def one(monkeypatch):
    """A kernel whose source is SCALE; the text can be changed."""
    texts = {"scale.cu": SCALE}
    monkeypatch.setattr("llmcompress.kernels.build.source_text", texts.__getitem__)
    return Kernel("scale.cu", "scale", (("FACTOR", 3),)), texts


@pytest.mark.parametrize("kind", [Nvrtc, Nvcc])
def test_compilers_make_code_for_the_architecture_that_is_asked_for(kind):
    compiler = compiler_or_skip(kind)
    made = {name: compiler(SCALE, (("FACTOR", 3),), name) for name in ("sm_80", "sm_89", "sm_90")}
    assert {architecture_of(cubin)[0] for cubin in made.values()} == {ELF_MACHINE_CUDA}
    flags = [architecture_of(cubin)[1] for cubin in made.values()]
    assert len(set(flags)) == 3
    assert all(b"scale" in cubin for cubin in made.values())


@pytest.mark.parametrize("kind", [Nvrtc, Nvcc])
def test_a_source_that_does_not_compile_is_one_line_with_the_compilers_words(kind):
    compiler = compiler_or_skip(kind)
    with pytest.raises(CompileError) as caught:
        compiler(SCALE, (), "sm_90")  # FACTOR is missing
    assert "FACTOR" in caught.value.message
    assert "\n" not in caught.value.message


def test_an_architecture_no_compiler_knows_is_an_error_of_its_own():
    compiler = compiler_or_skip(Nvrtc)
    with pytest.raises(CompileError, match="sm_12345"):
        compiler(SCALE, (("FACTOR", 3),), "sm_12345")


def test_includes_are_put_in_their_places_once(tmp_path):
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n#include "c.cuh"\nend of a\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "c.cuh"\nend of b\n')
    (tmp_path / "c.cuh").write_text("#pragma once\nall of c\n")
    assert expanded("a.cu", tmp_path).split("\n") == ["all of c", "", "end of b", "", "", "end of a", ""]


def test_what_was_compiled_is_found_again(one, tmp_path):
    kernel, _ = one
    compiler, said = Counting(), []
    first = Builder(compiler, Cache(tmp_path / "deep" / "cache"), "sm_90", said.append)
    cubin = first(kernel)
    assert first(Kernel("scale.cu", "another function", kernel.defines)) == cubin  # of the same source: not again
    assert (compiler.calls, first.compiled, first.cached) == (1, 1, 0)
    second = Builder(compiler, Cache(tmp_path / "deep" / "cache"), "sm_90", said.append)
    assert second(kernel) == cubin
    assert (compiler.calls, second.compiled, second.cached) == (1, 0, 1)
    assert said == []
    assert stat.S_IMODE((tmp_path / "deep" / "cache").stat().st_mode) & 0o022 == 0
    (entry,) = Cache(tmp_path / "deep" / "cache").entries()
    assert (entry.about["source"], entry.about["architecture"]) == ("scale.cu", "sm_90")


def test_whatever_changes_the_code_is_compiled_anew(one, tmp_path):
    kernel, texts = one
    compiler = Counting()
    cache = Cache(tmp_path)

    def build(kernel=kernel, architecture="sm_90"):
        return Builder(compiler, cache, architecture, print)(kernel)

    build()
    build(architecture="sm_80")
    build(Kernel("scale.cu", "scale", (("FACTOR", 4),)))
    texts["scale.cu"] += " "
    build()
    compiler.version = "counting 2"
    build()
    assert compiler.calls == 5
    build()
    assert compiler.calls == 5
    assert len(list(cache.entries())) == 5


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"", lambda b: b"\xff" + b])
def test_a_damaged_file_is_made_anew(one, tmp_path, damage):
    kernel, _ = one
    compiler, cache = Counting(), Cache(tmp_path)
    whole = Builder(compiler, cache, "sm_90", print)(kernel)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert next(cache.entries()).about is None
    assert Builder(compiler, cache, "sm_90", print)(kernel) == whole
    assert compiler.calls == 2
    assert next(cache.entries()).about is not None


def test_a_directory_that_cannot_be_written_costs_one_line(one, tmp_path):
    kernel, _ = one
    (tmp_path / "file").write_text("in the way")
    compiler, said = Counting(), []
    builder = Builder(compiler, Cache(tmp_path / "file" / "cache"), "sm_90", said.append)
    builder(kernel)
    builder(Kernel("scale.cu", "scale", (("FACTOR", 4),)))
    assert compiler.calls == 2
    assert len(said) == 1
    assert "not kept" in said[0]
    assert str(tmp_path) in said[0]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_nothing_half_written_stays(one, tmp_path, monkeypatch, error):
    kernel, _ = one

    def refuse(*_):
        raise error

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    said = []
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        Builder(Counting(), Cache(tmp_path), "sm_90", said.append)(kernel)
    assert list(tmp_path.iterdir()) == []
    assert isinstance(error, KeyboardInterrupt) or "No space left" in said[0]


def test_the_cache_lies_where_it_is_told_to(monkeypatch, tmp_path):
    monkeypatch.delenv("LLMCOMPRESS_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert directory_of() == tmp_path / "llmcompress" / "kernels"
    monkeypatch.setenv("LLMCOMPRESS_KERNEL_CACHE", str(tmp_path / "own"))
    assert directory_of() == tmp_path / "own"
    assert directory_of(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("LLMCOMPRESS_KERNEL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert directory_of() == tmp_path / "home" / ".cache" / "llmcompress" / "kernels"


def test_clearing_removes_our_files_alone(one, tmp_path):
    kernel, _ = one
    Builder(Counting(), Cache(tmp_path), "sm_90", print)(kernel)
    others = ["of others", "another_project.cubin", "some.partial"]
    for name in others:
        (tmp_path / name).write_text("")
    (tmp_path / f"{'0' * 64}.cubin").symlink_to(tmp_path / "nowhere")
    (tmp_path / f"{'0' * 64}abc_x1.partial").write_bytes(b"half")
    assert len(list(Cache(tmp_path).entries())) == 1
    count, size = Cache(tmp_path).clear()
    assert count == 2
    assert size > 4
    left = {file.name for file in tmp_path.iterdir() if not file.is_symlink()}
    assert left == set(others)
    assert Cache(tmp_path / "missing").clear() == (0, 0)


def test_nvcc_takes_the_place_of_a_missing_nvrtc(monkeypatch):
    def missing():
        raise KernelsError("NVRTC was not found")

    monkeypatch.setattr(compilers, "Nvrtc", missing)
    if shutil.which("nvcc"):
        assert find_compiler().version.startswith("nvcc ")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelsError) as caught:
        find_compiler()
    assert "NVRTC was not found" in caught.value.message
    assert "no nvcc" in caught.value.message
    assert "pip install nvidia-cuda-nvrtc" in str(caught.value.hint)


def test_an_nvcc_that_cannot_run_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "nvcc").write_bytes(b"junk")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsError, match="nvcc cannot be run: Exec format error"):
        compilers.Nvcc()


def test_keys_do_not_mix_fields_up():
    made = Made("a", "b", (("X", 1),), "sm_90", "c")
    assert made.key != Made("a", "b", (("X1", 1),), "sm_90", "c").key
    assert made.key == Made("a", "b", (("X", 1),), "sm_90", "c").key


def test_nvrtc_alone_compiles_every_source():
    """Without any header of a toolkit: one variant of each; all of them are built by `kernels check`."""
    compiler = compiler_or_skip(Nvrtc)
    found = 0
    for number, source in enumerate(sorted({kernel.source for _, kernel in variants("sm_90")})):
        architecture = ("sm_80", "sm_89", "sm_90")[number % 3]
        kernel = next(kernel for _, kernel in variants(architecture) if kernel.source == source)
        found += 1
        cubin = compiler(source_text(kernel.source), kernel.defines, architecture)
        assert architecture_of(cubin)[0] == ELF_MACHINE_CUDA
        assert kernel.name.encode() in cubin
    assert found >= 8
