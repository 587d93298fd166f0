"""A GGUF file made of another GGUF file: the new type of every tensor, and which tensors are copied."""

from llmcompress.arch.spec import ArchSpec, Linear
from llmcompress.engine.plan.gguf_plan import GgufModel, TensorTypes, choose_types, with_factors
from llmcompress.engine.source.gguf_input import GgufHeaders, carried_keys, names_of
from llmcompress.engine.source.matrix_refs import Matrices
from llmcompress.engine.source.tensor_names import MatrixRef
from llmcompress.errors import PlanError
from llmcompress.formats.base import FLOAT_TYPES
from llmcompress.formats.gguf.file import Placed
from llmcompress.formats.gguf.mixture import is_quantised
from llmcompress.formats.gguf.rules import Facts
from llmcompress.formats.gguf.tensors import GGUFTensor
from llmcompress.formats.gguf.types import file_type
from llmcompress.grids.ggml import GgufTypes, gguf_types
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.recipe import Output
from llmcompress.store.gguf_model import factors_of, is_factor

_HINT = "give the model directory that it was made from"


def file_matrices(headers: GgufHeaders) -> Matrices:
    """Every matrix of the layers, in the order of the file; which input a matrix reads is not known."""
    refs: list[MatrixRef] = []
    widths: dict[str, int] = {}
    for name, (whole, expert) in headers.parts.items():
        _, number, path = whole.removesuffix(".weight").split(".", 2) if whole.startswith("blk.") else ("", "", "")
        tensor = headers.gguf.tensors[whole]
        if path and is_quantised(whole, tensor.shape):
            module = name.removesuffix(".weight")
            here = module.split(".", 2)[2]
            refs.append(
                MatrixRef(module, int(number), expert if here != path else None, here, here, Linear(here, here))
            )
            widths[module] = tensor.shape[-1]
    spec = ArchSpec(headers.arch, (), (), layers="blk", never=(Linear("ffn_gate_inp", reads="ffn_in"),), observed=True)
    return Matrices(spec, refs, widths)


def file_model(headers: GgufHeaders, step: Method, output: Output, ledger: Ledger, measured: bool) -> GgufModel:
    """What GGUF files made of a GGUF file hold. measured: whether the run knows the importance of inputs.

    PlanError for what needs more than the file, and for tensors that would be rounded a second time, unless the step
    allows it.
    """
    asked = gguf_types(step) or GgufTypes(type="F32")
    _refuse(headers, step, output)
    tensors = [
        GGUFTensor(name, item.shape, names_of(item))
        for name, item in headers.gguf.tensors.items()
        if not is_factor(headers.gguf, name)
    ]
    heads = headers.number("attention.head_count")
    facts = Facts(
        headers.arch,
        headers.layers,
        heads,
        headers.number("attention.head_count_kv", heads),
        headers.number("expert_count", 0),
        measured,
    )
    kind = file_type(asked.type)
    chosen = choose_types(tensors, facts, kind, asked, ledger)
    by_name = {tensor.name: tensor for tensor in tensors}
    placed = tuple(Placed(by_name[name], choice.type) for name, choice in chosen.items())
    _note_requantised(headers, placed, asked.allow_requantize, ledger)
    copied = [item.tensor for item in placed if headers.gguf.tensors[item.tensor.name].type == item.type.name]
    names = frozenset(name for tensor in copied for name in tensor.sources)
    factors = {tensor.name: factors_of(headers.gguf, tensor.name) for tensor in copied}
    known = {name: [] if found is None else found.tolist() for name, found in factors.items()}
    return GgufModel(
        TensorTypes(kind, tuple(with_factors(placed, known)), headers.arch, names), carried_keys(headers, kind.id)
    )


def _refuse(headers: GgufHeaders, step: Method, output: Output) -> None:
    if step.needs_calibration:
        raise PlanError(f"{headers.path} is a GGUF file, which {step.name} cannot run text through", _HINT)
    if output.modelfile or output.pre is not None:
        option = "a Modelfile" if output.modelfile else "the name of a pre-tokenizer"
        raise PlanError(f"{headers.path} is a GGUF file: {option} asks for the tokenizer's own files", _HINT)
    if output.base_model is not None or output.license is not None:
        option = "--base-model" if output.base_model is not None else "--license"
        raise PlanError(f"{headers.path} is a GGUF file, whose keys stay what they are", f"leave {option} out")


def _note_requantised(headers: GgufHeaders, placed: tuple[Placed, ...], allowed: bool, ledger: Ledger) -> None:
    """Note which codes are decoded and rounded anew; PlanError if the step does not allow that."""
    found: dict[tuple[str, str], int] = {}
    for item in placed:
        stored = headers.gguf.tensors[item.tensor.name].type
        if stored not in FLOAT_TYPES and stored != item.type.name:
            found[stored, item.type.name] = found.get((stored, item.type.name), 0) + 1
    if found and not allowed:
        stored, wanted = next(iter(found))
        raise PlanError(
            f"{headers.path} is quantised already ({sum(found.values())} tensors such as {stored} to {wanted}), "
            "and rounding twice adds both errors",
            f"{_HINT}, or pass --allow-requantize",
        )
    for (stored, wanted), count in found.items():
        ledger.note("requantised", f"{count} tensors", f"{stored} in the file, decoded and rounded anew to {wanted}")
