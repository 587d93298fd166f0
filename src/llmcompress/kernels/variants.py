"""Every kernel there is, by family: what `kernels check` builds."""

from collections.abc import Iterator

from llmcompress.kernels import dequantise, ggml_products, gpu_sweep, int8, matmul, progressive
from llmcompress.kernels.launch import Kernel


def variants(architecture: str) -> Iterator[tuple[str, Kernel]]:
    """Family and kernel of all that is ever launched on an architecture, each once."""
    products = {"a16": matmul, "dequantise": dequantise, "w8a8": int8, "w4a8": progressive, "gguf": ggml_products}
    families = {**products, "sweep": gpu_sweep}
    seen: set[Kernel] = set()
    for name, family in families.items():
        for kernel in family.variants(architecture):
            if kernel not in seen:
                seen.add(kernel)
                yield name, kernel
