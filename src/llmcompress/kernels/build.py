"""Building cubins of kernels: read from the cache, or compiled and cached."""

from collections.abc import Callable
from hashlib import sha256

from llmcompress.kernels.build_cache import Cache, Made
from llmcompress.kernels.compilers import Compiler
from llmcompress.kernels.launch import Kernel
from llmcompress.kernels.source import source_text

Say = Callable[[str], None]


class Builder:
    """Builds kernels for one architecture. say: told, once, that the cache cannot be written.

    compiled, cached: how many were compiled, and found in the cache.
    """

    def __init__(self, compiler: Compiler, cache: Cache, architecture: str, say: Say) -> None:
        self.compiler, self.cache, self.architecture = compiler, cache, architecture
        self.compiled = self.cached = 0
        self._say: Say | None = say
        self._built: dict[tuple[str, tuple[tuple[str, int], ...]], bytes] = {}

    def __call__(self, kernel: Kernel) -> bytes:
        """The cubin that holds a kernel; CompileError."""
        key = kernel.source, kernel.defines
        if key not in self._built:
            self._built[key] = self._build(kernel)
        return self._built[key]

    def _build(self, kernel: Kernel) -> bytes:
        text = source_text(kernel.source)
        made = Made(
            kernel.source,
            sha256(text.encode()).hexdigest(),
            kernel.defines,
            self.architecture,
            self.compiler.version,
        )
        cubin = self.cache.read(made)
        if cubin is not None:
            self.cached += 1
            return cubin
        cubin = self.compiler(text, kernel.defines, self.architecture)
        self.compiled += 1
        try:
            self.cache.write(made, cubin)
        except OSError as error:
            self._tell(error)
        return cubin

    def _tell(self, error: OSError) -> None:
        if self._say is not None:
            self._say(f"compiled kernels are not kept: {self.cache.directory} cannot be written ({error.strerror})")
            self._say = None
