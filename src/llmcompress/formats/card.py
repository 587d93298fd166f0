"""The model card: README.md with the front matter that hubs read, the recipe, and the figures of the run."""

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from llmcompress.formats.front_matter import HUB_ID, front_matter, hub_ids, names

_LOADING = {
    "gptq": "transformers (with `optimum` and `gptqmodel`), GPTQModel, vLLM and SGLang read gptq checkpoints.",
    "awq": "transformers (with `gptqmodel` and `accelerate`), GPTQModel, vLLM and SGLang read awq checkpoints.",
    "auto-round": "transformers (with `auto-round`), vLLM and SGLang read auto-round checkpoints.",
    "compressed-tensors": "vLLM, SGLang and transformers (with `compressed-tensors`) read this checkpoint.",
    "mlx": "mlx-lm reads this checkpoint.",
    "bitsandbytes": "transformers reads this checkpoint, with `bitsandbytes` installed.",
    "codebook": "Only llmcompress reads this checkpoint: `llmcompress eval` runs it, `gguf` converts it.",
    "qoq": "Only llmcompress reads this checkpoint: `llmcompress eval` runs it, `gguf` converts it.",
    "int8-outliers": "Only llmcompress reads this checkpoint: `llmcompress eval` runs it.",
    "gguf": "llama.cpp and what is built on it read this file.",
    "dense": "Weights are stored decoded, in the type of the original: whatever loads the original loads this.",
}
_LIBRARIES = {"mlx": "mlx", "gguf": "gguf", **dict.fromkeys(("codebook", "qoq", "int8-outliers"), "llmcompress")}
"""By format, what hubs call the library that loads it; transformers for all others."""
_SNIPPETS = {
    "transformers": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
ids = tokenizer("The river", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=32)[0]))
```""",
    "mlx": """```sh
mlx_lm.generate --model . --prompt "The river" --max-tokens 32
```""",
    "gguf": """```sh
llama-completion -m FILE -no-cnv -n 32 -p "The river"
```""",
    "llmcompress": """```sh
llmcompress eval . --windows 8 --generate "The river"
```""",
}


def model_card(facts: Mapping[str, Any]) -> str:
    """README.md from facts, of which only `name`, `format` and `version` are required:

    name: title. format: name of the checkpoint format. version: of llmcompress.
    config: config.json of the source. source_readme: README.md of the source, for the licence and the origin that it
    declares. base_model, license: what a user says in their place.
    grids: {grid name: number of matrices on it}. bits: distinct widths in bits. methods: names of methods in order.
    inputs: width of inputs in bits while the model runs, 16 if absent.
    calibration: {label: value}. figures: {label: value}, such as sizes and errors. notes: sentences about engines.
    unquantised: matrices left in their source type. recipe: YAML text that reproduces the result.
    file: the name of the first file of weights, where the format is gguf.
    change: what was done to the model in one word, "quantized" if absent.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(**_front_matter(facts))
    parts = [
        f"# {facts['name']}",
        _opening(facts),
        _LOADING.get(facts["format"], ""),
        *(f"- {note}" for note in facts.get("notes", ())),
        "## Use",
        f"In this directory:\n\n{_SNIPPETS[_library(facts)].replace('FILE', quote(facts.get('file', '')))}",
    ]
    for title, key in (("Grids", "grids"), ("Calibration", "calibration"), ("Figures", "figures")):
        if facts.get(key):
            parts += [f"## {title}", _table(facts[key], "matrices" if key == "grids" else "value")]
    if facts.get("unquantised"):
        parts += ["## Left in their source type", "\n".join(f"- `{name}`" for name in facts["unquantised"])]
    if facts.get("recipe"):
        recipe = str(facts["recipe"]).rstrip("\n")
        parts += ["## Recipe", f"```yaml\n{recipe}\n```", "`llmcompress run` reproduces this directory from it."]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_joined(parts)}"))


def _front_matter(facts: Mapping[str, Any]) -> dict[str, Any]:
    said = front_matter(facts.get("source_readme") or "", licence=facts.get("license"))
    matter: dict[str, Any] = {}
    if base := _source_id(facts):
        matter |= {"base_model": base}
        if facts.get("change", "quantized") == "quantized":  # hubs have no word for what has lost parts
            matter |= {"base_model_relation": "quantized"}
    elif origins := hub_ids(said.get("base_model")):  # of the source itself: what was done to them is not known
        matter |= {"base_model": origins}
    for key in ("license", "license_name", "license_link"):
        value = said.get(key)
        if value and names(value) == (value if isinstance(value, list) else [value]):
            matter[key] = value
    matter |= {"library_name": _library(facts), "pipeline_tag": "text-generation"}
    tags = ["llmcompress", facts.get("change", "quantized")]
    if facts["format"] != "dense":  # whose weights have 16 bits again
        tags.append(facts["format"])
        for bits in sorted(facts.get("bits", ())):
            tags += [f"{bits}-bit", f"w{bits}a{facts.get('inputs', 16)}"]
    return matter | {"tags": tags}


def _library(facts: Mapping[str, Any]) -> str:
    return _LIBRARIES.get(facts["format"], "transformers")


def _source_id(facts: Mapping[str, Any]) -> str | None:
    """The name of the source on a hub: as the user says, or that it was loaded under, if that is no path."""
    said = facts.get("base_model") or (facts.get("config") or {}).get("_name_or_path")
    return said if isinstance(said, str) and HUB_ID.fullmatch(said) else None


def _opening(facts: Mapping[str, Any]) -> str:
    methods = " and ".join(facts.get("methods", ())) or "rounding"
    base = _source_id(facts)
    return (
        f"{f'`{base}`' if base else 'A language model'}, compressed by {methods} "
        f"with llmcompress {facts['version']} and stored in format `{facts['format']}`."
        + (f" Before that an adapter was merged into it (SHA-256 `{facts['adapter']}`)." if "adapter" in facts else "")
    )


def _table(rows: Mapping[str, Any], column: str) -> str:
    lines = [f"| | {column} |", "| --- | --- |"]
    return "\n".join(lines + [f"| {_cell(label)} | {_cell(value)} |" for label, value in rows.items()])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _joined(parts: Sequence[str]) -> str:
    """Paragraphs with an empty line between them; list items stay together."""
    text = ""
    for part in filter(None, parts):
        text += ("\n" if part.startswith("- ") and text.rsplit("\n", 2)[-1].startswith("- ") else "\n\n") + part
    return text.lstrip("\n") + "\n"
