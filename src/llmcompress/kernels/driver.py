"""The CUDA driver by its C interface: loading a cubin, and starting a kernel of it on a stream."""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from types import TracebackType

from torch import Tensor

from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.launch import Launch

_LIBRARY = "libcuda.so.1"
_MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_SLOT = 8  # bytes that each argument has here, the larger of a pointer and a number


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes; here a number."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_uint), ("rest", c_uint * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: the shape and stream of a launch."""

    _fields_ = (
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", POINTER(LaunchAttribute)),
        ("numAttrs", c_uint),
    )


_SIGNATURES = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernelEx": [POINTER(LaunchConfig), c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


class Driver:
    """The driver for one GPU; `with` makes current the context that torch uses too, in whichever thread.

    KernelsError where there is no driver, and from every method with the driver's own words.
    """

    def __init__(self, device: int) -> None:
        self._library = _opened()
        number, context = c_int(), c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", byref(context), number)
        self._context = context

    def __enter__(self) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def load(self, cubin: bytes, name: str) -> c_void_p:
        """A kernel of a cubin, which stays loaded."""
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), cubin)
        self._call("cuModuleGetFunction", byref(function), module, name.encode())
        return function

    def allow(self, function: c_void_p, shared: int) -> None:
        """Let a kernel have this many bytes of shared memory."""
        self._call("cuFuncSetAttribute", function, _MOST_DYNAMIC_SHARED, shared)

    def start(self, function: c_void_p, config: LaunchConfig, arguments: Sequence[Tensor | int | float]) -> None:
        """Launch a kernel: a Tensor is passed as the pointer to its data, an int as int32, a float as float32."""
        values = _packed(arguments)
        first = ctypes.addressof(values)
        places = (c_void_p * len(arguments))(*range(first, first + _SLOT * len(arguments), _SLOT))
        self._call("cuLaunchKernelEx", byref(config), function, places, None)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            told = [c_char_p(), c_char_p()]
            self._library.cuGetErrorName(status, byref(told[0]))
            self._library.cuGetErrorString(status, byref(told[1]))
            words = [(text.value or b"unknown").decode(errors="replace") for text in told]
            raise KernelsError(f"{name} fails: {words[0]}, {words[1]}")


def config_of(launch: Launch, stream: int, early: bool) -> LaunchConfig:
    """stream: its address, 0 for the default one. early: it may begin before the launches before it have ended."""
    attributes = (LaunchAttribute * 1)(LaunchAttribute(_PROGRAMMATIC_SERIALIZATION, 0, 1))
    return LaunchConfig(*launch.grid, *launch.block, launch.shared, stream, attributes, int(early))


def _packed(arguments: Sequence[Tensor | int | float]) -> "ctypes.Array[ctypes.c_char]":
    """Arguments in slots of their own; struct.error for a number that has no place in 32 bits."""
    kinds = "".join(
        "P" if isinstance(item, Tensor) else "i4x" if isinstance(item, int) else "f4x" for item in arguments
    )
    values = ctypes.create_string_buffer(_SLOT * len(arguments))
    struct.pack_into(kinds, values, 0, *(item.data_ptr() if isinstance(item, Tensor) else item for item in arguments))
    return values


def _opened() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
        for function, arguments in _SIGNATURES.items():
            getattr(library, function).argtypes = arguments
    except (OSError, AttributeError) as error:  # an older one lacks a function
        raise KernelsError(
            f"the CUDA driver cannot be used ({error})",
            "kernels are launched on Linux, by a driver of CUDA 12 or newer",
        ) from None
    return library
