"""The recipe: everything that a user asks of a run, as strict data. Commands build it, YAML files hold it."""

import re
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError

import llmcompress.formats
import llmcompress.methods
import llmcompress.pruners
import llmcompress.transforms
from llmcompress.errors import RecipeError
from llmcompress.formats.front_matter import HUB_ID
from llmcompress.methods.base import Method, Plain
from llmcompress.pruners.base import Pruner
from llmcompress.registry import discover, suggest
from llmcompress.transforms.base import Transform
from llmcompress.yamlfile import SIZE, read_yaml

DEFAULT_FORMAT = "compressed-tensors"

_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}")
_shown = Repr()  # shortens values in messages, which may be anything that fits into a file
_shown.maxstring = _shown.maxother = _shown.maxlong = 100
_shown.maxlevel = 3


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Calibration(_Strict):
    """Which text the statistics come from."""

    source: str = Field(
        "default", description="'default' (calib_data), 'self', or a path: text, folder, jsonl, parquet, ids"
    )
    options: dict[str, Plain] = Field(default_factory=dict, description="options of the source, such as field")
    samples: int = Field(128, ge=1, le=1_000_000, description="windows of text")
    length: int = Field(512, ge=2, le=1 << 24, description="tokens per window")
    seed: int = Field(0, ge=0, lt=1 << 63, description="which windows are drawn")
    imatrix: str | None = Field(None, description="importance matrix that a method without calibration goes by")


def _hub_id(value: str | None) -> str | None:
    if value is not None and not HUB_ID.fullmatch(value):
        raise RecipeError(f"base model {_shown.repr(value)} is no name of a hub", "write OWNER/NAME")
    return value


def _licence(value: str | None) -> str | None:
    if value is not None and not _LICENCE.fullmatch(value):
        raise RecipeError(
            f"licence {_shown.repr(value)} is no id of a hub",
            "write for example apache-2.0, or other for one of its own",
        )
    return value


class Output(_Strict):
    """What is written."""

    format: str = Field(DEFAULT_FORMAT, description="checkpoint format")
    shard_size: int | None = Field(
        None, ge=1_000_000, lt=1 << 63, description="bytes per weight file at most; none: 5 GB, one file for gguf"
    )
    modelfile: bool = Field(False, description="write a Modelfile for Ollama beside a GGUF file")
    pre: str | None = Field(None, description="llama.cpp's name of the pre-tokenizer, where it is not recognised")
    base_model: Annotated[str | None, AfterValidator(_hub_id)] = Field(
        None, description="OWNER/NAME on a hub that the model card names in place of the source's"
    )
    license: Annotated[str | None, AfterValidator(_licence)] = Field(
        None, description="a hub's id of the licence that the model card names in place of the source's"
    )


class KvCache(_Strict):
    """Static scales for keys and values that are cached in 8 or 4 bits, measured on the calibration text."""

    code: Literal["fp8", "int8", "nvfp4"] = Field(description="what a cache holds: fp8 and nvfp4 are read by vLLM")


class Expected(_Strict):
    """What was expected of a recipe when it was made to fit a budget; it says nothing about how to carry it out."""

    kl: float = Field(ge=0, le=1e9, description="KL divergence from the original, nats per token")
    bits_per_quantised_weight: float = Field(gt=0, le=64, description="stored bits, scales included")
    output_bytes: int = Field(gt=0, lt=1 << 63, description="bytes of all weight files")


def methods() -> dict[str, type[Method]]:
    """All methods by name."""
    return discover(llmcompress.methods, "METHOD")


def pruners() -> dict[str, type[Pruner]]:
    """All pruners by name."""
    return discover(llmcompress.pruners, "PRUNER")


def transforms() -> dict[str, type[Transform]]:
    """All transforms by name."""
    return discover(llmcompress.transforms, "TRANSFORM")


def formats() -> dict[str, Any]:
    """All formats that can be written, by name."""
    return {name: item for name, item in stored_formats().items() if item.writes}


def stored_formats() -> dict[str, Any]:
    """All formats that sources may have, by name; `formats` are those of them that can be written."""
    return discover(llmcompress.formats, "FORMAT")


def format_named(name: str) -> Any:
    """The format of an output; RecipeError if none of that name can be written."""
    known = formats()
    if name in stored_formats() and name not in known:
        raise RecipeError(f"format {name} is read and not written", f"known: {', '.join(known)}")
    if name not in known:
        raise RecipeError(f"unknown format {name!r}", suggest(name, list(known)))
    return known[name]


def _step(value: Any) -> Any:
    if isinstance(value, Method | Pruner | Transform):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("method"), str):
        raise RecipeError("a step needs a method", "write for example {method: gptq, bits: 4}")
    options = {key: item for key, item in value.items() if key != "method"}
    known: dict[str, Any] = {**methods(), **pruners(), **transforms()}
    if value["method"] not in known:
        raise RecipeError(f"unknown method {value['method']!r}", suggest(value["method"], list(known)))
    return build(known[value["method"]], options, f"step {value['method']}")


Step: TypeAlias = Method | Pruner | Transform


class Recipe(_Strict):
    """Calibration, steps, output: the whole of a run but for the model and where the result goes."""

    calibration: Calibration = Calibration()
    steps: tuple[Annotated[SerializeAsAny[Step], BeforeValidator(_step)], ...]
    output: Output = Output()
    kv_cache: KvCache | None = None
    expected: Expected | None = None

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The steps that change where errors fall, before anything is rounded."""
        return tuple(step for step in self.steps if isinstance(step, Transform))

    @property
    def pruner(self) -> Pruner | None:
        """The step that makes weights zero, if there is one."""
        return next((step for step in self.steps if isinstance(step, Pruner)), None)

    @property
    def method(self) -> Method | None:
        """The step that rounds, if there is one."""
        return next((step for step in self.steps if isinstance(step, Method)), None)

    @property
    def scales_channels(self) -> bool:
        """Whether steps choose factors of channels layer by layer."""
        return any(step.needs_calibration for step in self.transforms)

    @property
    def needs_calibration(self) -> bool:
        """Whether anything but the method needs text: factors of transforms, or ranges of keys and values."""
        return self.kv_cache is not None or self.scales_channels

    def as_data(self) -> dict[str, Any]:
        """The recipe as plain data, which `parse` reads. Defaults are written out: later versions may change them."""
        return {
            "calibration": self.calibration.model_dump(),
            "steps": [{"method": step.name, **step.model_dump()} for step in self.steps],
            "output": self.output.model_dump(),
            "kv_cache": None if self.kv_cache is None else self.kv_cache.model_dump(),
            **({} if self.expected is None else {"expected": self.expected.model_dump()}),
        }

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.as_data(), sort_keys=False, allow_unicode=True)


def build(model: type[BaseModel], options: dict[str, Any], where: str) -> Any:
    """An options object from plain data; RecipeError names the option, its value and the nearest known name."""
    try:
        return model(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise RecipeError(f"unknown option {key!r} in {where}", suggest(key, list(model.model_fields))) from None
        message = first["msg"][:1].lower() + first["msg"][1:]
        if not key:  # of options that contradict each other
            raise RecipeError(f"{where}: {message.removeprefix('value error, ')}") from None
        raise RecipeError(f"{where}: {key} = {_shown.repr(first['input'])}: {message}") from None
    except TypeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _optional(model: type[BaseModel], data: dict[str, Any], key: str, where: str) -> Any:
    """The options object under a key; None where the data has no such key."""
    return None if data.get(key) is None else build(model, _mapping(data, key, where), f"{key} of {where}")


def parse(data: Any, where: str = "recipe") -> Recipe:
    """A recipe from plain data; RecipeError for an unknown key and for whatever is not a recipe."""
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise RecipeError(f"{where} is not a mapping of calibration, steps and output")
    unknown = [key for key in data if key not in Recipe.model_fields]
    if unknown:
        raise RecipeError(f"unknown key {unknown[0]!r} in {where}", suggest(unknown[0], list(Recipe.model_fields)))
    steps = data.get("steps")
    if not isinstance(steps, list | tuple) or not steps:
        raise RecipeError(f"{where} has no steps", "write for example steps: [{method: gptq, bits: 4}]")
    return Recipe(
        calibration=build(Calibration, _mapping(data, "calibration", where), f"calibration of {where}"),
        steps=tuple(_step(step) for step in steps),
        output=build(Output, _mapping(data, "output", where), f"output of {where}"),
        kv_cache=_optional(KvCache, data, "kv_cache", where),
        expected=_optional(Expected, data, "expected", where),
    )


def _mapping(data: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = data.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise RecipeError(f"{key} of {where} is not a mapping")
    return value


def load(path: Path) -> Recipe:
    """A recipe from a YAML file."""
    return parse(read(path), str(path))


def read(path: Path) -> Any:
    """The plain data of a YAML file, not yet checked; RecipeError for a file that cannot be read."""
    try:
        if path.exists() and not path.is_file():  # a pipe would block for ever
            raise RecipeError(f"recipe {path} is not a file")
        if path.exists() and path.stat().st_size > 4 * SIZE:
            raise RecipeError(f"recipe {path} has {path.stat().st_size:,} bytes, which no recipe has")
        return read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not UTF-8 (byte {error.start})") from None
    except ValueError as error:
        line = " ".join(str(error).split())
        raise RecipeError(f"recipe {path} is not valid YAML: {line}") from None
