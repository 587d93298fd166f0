"""`verify`, `inspect` and `list`: looking at what is there."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcompress.api import verification
from llmcompress.cli import console, watching
from llmcompress.cli import options as flags
from llmcompress.cli.gates import GateCase, gated
from llmcompress.store.headers import read_json

if TYPE_CHECKING:
    from llmcompress.store.headers import ModelHeaders
    from llmcompress.validate.findings import Check


_Row = tuple[str, str, Sequence[int], int, str]
"""Name, type, shape, bytes and file of a tensor."""


def register(app: typer.Typer) -> None:
    app.command("verify", rich_help_panel="Prove")(verify)
    app.command("inspect", rich_help_panel="Look")(inspect)
    app.command("list", rich_help_panel="Look")(list_)


def verify(
    out: Annotated[Path, typer.Argument(help="A directory or GGUF file llmcompress wrote.", show_default=False)],
    source: Annotated[Path | None, typer.Option("--source", help="The original model, to compare with.")] = None,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="The adapter that was merged into it.")] = None,
    json_: flags.Json = False,
    junit: flags.Junit = None,
    log_format: flags.LogFormat = "text",
) -> None:
    """Reopen an output with a reader of its own and prove it complete, finite, on its grid and true to its report."""
    with gated("verify", junit) as gates:
        with watching.reading(json_):
            result = verification.verify(out, source, adapter)
        for item in result.checks:
            if item.warning and not item.ok:
                gates.add(GateCase(item.name, "skipped", f"warning: {item.detail}"))
            else:
                gates.judge(item.name, item.ok, item.detail, "nothing wrong", item.detail)
        if json_:
            console.print_json({"ok": result.ok, "checks": [asdict(item) for item in result.checks]})
        else:
            rows = [(_mark(item), item.name, item.detail) for item in result.checks]
            console.table(None, ("", "check", "detail"), rows)
        result.fail_if_damaged()
        if source is not None and not json_:
            console.next_step("eval", out, "--ref", source)


def _mark(check: "Check") -> str:
    return "ok" if check.ok else "warning" if check.warning else "FAILED"


def _stated(value: Any) -> Any:
    """A fact of config.json, which is a scalar; None for a list or an object, which states none."""
    return None if isinstance(value, list | dict) else value


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="A model directory, original or compressed, or a GGUF file.", show_default=False)
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json_: flags.Json = False,
) -> None:
    """What a checkpoint holds, from its headers alone: nothing is loaded."""
    from llmcompress.engine.source.multimodal import text_view
    from llmcompress.store.headers import read_headers, with_settings
    from llmcompress.validate.gguf_file import gguf_in

    if (file := gguf_in(checkpoint)) is not None:
        _inspect_gguf(file, tensors, json_)
        return
    headers = with_settings(text_view(read_headers(checkpoint)))
    config = headers.config
    quantization, architectures = config.get("quantization_config"), config.get("architectures")
    kinds = Counter[str]()
    for stored in headers.tensors.values():
        kinds[stored.spec.dtype] += stored.spec.nbytes
    facts: dict[str, Any] = {
        "path": str(checkpoint),
        "model_type": _stated(headers.whole_config.get("model_type")),
        "architecture": _stated(architectures[0]) if isinstance(architectures, list) and architectures else None,
        "layers": _stated(config.get("num_hidden_layers", config.get("n_layer"))),
        "hidden_size": _stated(config.get("hidden_size", config.get("n_embd"))),
        "vocab_size": _stated(config.get("vocab_size")),
        "tied_embeddings": not any(name.endswith("lm_head.weight") for name in headers.tensors),
        "files": len(headers.files),
        "tensors": len(headers.tensors),
        "bytes": headers.nbytes,
        "bits_per_weight": _bits_per_weight(headers),
        "bytes_by_type": dict(sorted(kinds.items())),
        "quantization": quantization,
    }
    rows = [(t.spec.name, t.spec.dtype, t.spec.shape, t.spec.nbytes, t.file.name) for t in headers.tensors.values()]
    if json_:
        console.print_json({**facts, **({"tensor_list": _tensor_list(rows)} if tensors else {})})
        return
    shown = dict(facts, bytes=console.size(headers.nbytes))
    shown["bytes_by_type"] = ", ".join(f"{kind} {console.size(count)}" for kind, count in sorted(kinds.items()))
    shown["quantization"] = _summary(quantization)
    if shown["bits_per_weight"] is None:
        shown["bits_per_weight"] = "not known: no report.json says how many weights the codes are"
    console.table(None, ("", ""), [(key.replace("_", " "), str(value)) for key, value in shown.items()])
    if tensors:
        _tensor_table(rows)


def _bits_per_weight(headers: "ModelHeaders") -> float | None:
    """Bits of all tensors for each weight; of packed codes as the report says, None where there is none."""
    report = headers.path / "report.json"
    if headers.config.get("quantization_config") is not None:
        said = read_json(report).get("bits_per_weight") if report.is_file() else None
        return said if isinstance(said, float) else None
    weights = sum(prod(stored.spec.shape) for stored in headers.tensors.values())
    return round(8 * headers.nbytes / weights, 4) if weights else None


def _inspect_gguf(file: Path, tensors: bool, json_: bool) -> None:
    from llmcompress.store.gguf_model import read_gguf
    from llmcompress.validate.gguf_facts import gguf_facts

    header = read_gguf(file)
    found = gguf_facts(header)
    rows = [(t.name, t.type, t.shape, t.nbytes, t.file.name) for t in header.tensors.values()]
    if json_:
        console.print_json({**found, **({"tensor_list": _tensor_list(rows)} if tensors else {})})
        return
    tokenizer = found["tokenizer"]
    special = ", ".join(f"{name} {number}" for name, number in tokenizer["special_ids"].items())
    shown = dict(found, bytes=console.size(found["bytes"]))
    shown["types"] = ", ".join(
        f"{kind} {of['tensors']} tensors {console.size(of['bytes'])}" for kind, of in found["types"].items()
    )
    shown["tokenizer"] = f"{tokenizer['model']}, pre-tokenizer {tokenizer['pre']}"
    shown["special_ids"] = special or "none"
    shown["chat_template"] = "yes" if tokenizer["chat_template"] else "no"
    shown["imatrix"] = ", ".join(f"{key} {value}" for key, value in found["imatrix"].items()) or "none"
    console.table(None, ("", ""), [(key.replace("_", " "), str(value)) for key, value in shown.items()])
    if tensors:
        _tensor_table(rows)


def _tensor_list(tensors: Iterable[_Row]) -> list[dict[str, Any]]:
    """Tensors for programs."""
    return [{"name": name, "dtype": kind, "shape": list(shape), "file": file} for name, kind, shape, _, file in tensors]


def _tensor_table(tensors: Iterable[_Row]) -> None:
    """Tensors for people."""
    rows = [
        (name, kind, " x ".join(map(str, shape)), console.size(nbytes), file)
        for name, kind, shape, nbytes, file in tensors
    ]
    console.table(None, ("tensor", "type", "shape", "size", "file"), rows, right=(3,))


def _summary(quantization: Any) -> str:
    if not isinstance(quantization, dict):
        return "none"
    groups = quantization.get("config_groups")
    if isinstance(groups, dict):
        parts = []
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if not isinstance(weights, dict):
                continue
            parts.append(_coded(weights) + _rounded(group.get("input_activations")))
        cached = quantization.get("kv_cache_scheme")
        if isinstance(cached, dict):
            parts.append(f"keys and values {cached.get('type')} {cached.get('num_bits')} by {cached.get('strategy')}")
        elif isinstance(cached, str):
            parts.append(f"keys and values {cached}")
        whole = quantization.get("format", quantization.get("quant_algo", ""))
        return f"{quantization.get('quant_method')} {whole}: {'; '.join(parts)}"
    if isinstance(modules := quantization.get("modules"), dict):
        return f"{quantization.get('quant_method')}: {len(modules)} matrices"
    if "load_in_4bit" in quantization:
        kind = quantization.get("bnb_4bit_quant_type") if quantization["load_in_4bit"] else "int8"
        return f"{quantization.get('quant_method')}: {kind}"
    bits, group, mode = (quantization.get(key) for key in ("bits", "group_size", "mode"))
    method = quantization.get("quant_method") or ("mlx" if mode else "unknown")  # mlx-lm names none
    blocks, inputs = quantization.get("weight_block_size"), quantization.get("activation_scheme")
    said = [f"{bits} bits"] if bits is not None else []
    said += [f"group size {group}"] if group is not None else []
    said += [f"blocks of {' x '.join(map(str, blocks))}"] if isinstance(blocks, list) else []
    said += [f"inputs {inputs}"] if inputs is not None else []
    return f"{method}{f' {mode}' if mode else ''}{': ' if said else ''}{', '.join(said)}"


def _coded(weights: dict[str, Any]) -> str:
    kind = " float" if weights.get("type") == "float" else ""
    shared = " ".join(str(said) for said in (weights.get("strategy"), weights.get("group_size")) if said)
    return f"{weights.get('num_bits')} bits{kind}, {shared or 'tensor'}"


def _rounded(inputs: Any) -> str:
    """What is said of inputs, as an addition to what is said of weights."""
    if not isinstance(inputs, dict):
        return ""
    scale = "dynamic" if inputs.get("dynamic") else "fixed"
    shared = inputs.get("strategy") or inputs.get("group_size") or "tensor"
    return f", inputs {inputs.get('num_bits')} bits {inputs.get('type')} by {shared} ({scale} scale)"


def list_(
    what: Annotated[
        str, typer.Argument(help="methods, grids, formats, archs, sources, targets or ledger.", show_default=False)
    ],
    json_: flags.Json = False,
) -> None:
    """What is built in."""
    from llmcompress.cli.catalogue import catalogue

    columns, rows = catalogue(what)
    if json_:
        console.print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        console.table(None, columns, rows)
