"""NVRTC, the compiler that comes with CUDA builds of torch, by its C interface."""

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path

import torch

from llmcompress.kernels.compile_errors import INSTALL, KernelsError, not_compiled

MAJORS = (13, 12)  # versions of CUDA that torch is built with
_SIGNATURES = {
    "nvrtcVersion": [POINTER(c_int), POINTER(c_int)],
    "nvrtcCreateProgram": [POINTER(c_void_p), c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_char_p)],
    "nvrtcCompileProgram": [c_void_p, c_int, POINTER(c_char_p)],
    "nvrtcGetCUBINSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetCUBIN": [c_void_p, c_char_p],
    "nvrtcGetProgramLogSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetProgramLog": [c_void_p, c_char_p],
    "nvrtcDestroyProgram": [POINTER(c_void_p)],
}


class Nvrtc:
    """A `Compiler`; KernelsError where there is no NVRTC."""

    def __init__(self) -> None:
        self._library = _opened()
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = f"nvrtc {major.value}.{minor.value}"

    def __call__(self, text: str, defines: Sequence[tuple[str, int]], architecture: str) -> bytes:
        macros = [f"-D{name}={value}" for name, value in defines]
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "--fmad=false", *macros]
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), text.encode(), b"kernel.cu", 0, None, None)
        try:
            given = (c_char_p * len(options))(*map(str.encode, options))
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            if status != 0:
                log = self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
                raise not_compiled(self.version, architecture, log.strip() or self._meaning(status))
            return self._read(program, "nvrtcGetCUBIN")
        finally:
            self._call("nvrtcDestroyProgram", byref(program))

    def _read(self, program: c_void_p, what: str) -> bytes:
        """What `<what>Size` says the size of."""
        size = c_size_t()
        self._call(f"{what}Size", program, byref(size))
        space = ctypes.create_string_buffer(size.value)
        self._call(what, program, space)
        return space.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise KernelsError(f"{name} fails: {self._meaning(status)}", INSTALL)

    def _meaning(self, status: int) -> str:
        told: bytes = self._library.nvrtcGetErrorString(status)
        return told.decode(errors="replace")


def _opened() -> ctypes.CDLL:
    """The first library that loads; KernelsError with the first one's reason where none does."""
    reasons = []
    for name in _candidates():
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
                ctypes.CDLL(str(builtins))  # NVRTC asks for it by its name alone
            library = ctypes.CDLL(name)
            for function, arguments in _SIGNATURES.items():
                getattr(library, function).argtypes = arguments
            library.nvrtcGetErrorString.argtypes, library.nvrtcGetErrorString.restype = [c_int], c_char_p
        except (OSError, AttributeError) as error:  # an older one lacks a function
            reasons.append(str(error))
        else:
            return library
    raise KernelsError(f"NVRTC was not found ({reasons[0]})", INSTALL)


def _candidates() -> Iterator[str]:
    """Libraries as PyPI's packages nvidia-cuda-nvrtc install them, then the system's; those of torch's CUDA first."""
    majors = sorted(MAJORS, key=lambda major: not (torch.version.cuda or "").startswith(f"{major}."))
    spec = find_spec("nvidia")  # a namespace without code: nothing is imported
    folders = [Path(place) for place in (spec.submodule_search_locations or [] if spec else [])]
    for major in majors:
        for folder in folders:
            yield from map(str, sorted(folder.glob(f"*/lib/libnvrtc.so.{major}")))
    yield from (f"libnvrtc.so.{major}" for major in majors)
