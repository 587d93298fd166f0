"""Every grid goes through all methods, a format that holds it, `verify` and the report: a new one as well."""

import json

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.calib.pack import save
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.formats.base import TensorSpec
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.fitting import fit
from llmcompress.grids.grid_type import grid_types, spec_named
from llmcompress.recipe import formats, methods, parse
from llmcompress.validate.verify import passed, verify
from tinyruns import compress

TYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint32: "U32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
CHOSEN = [name for name, grid in grid_types().items() if grid.chosen]
STEPS = {"rtn": [{"method": "rtn"}], "gptq": [{"method": "gptq", "qep_alpha": 0}]}
STEPS["awq"] = [{"method": "awq", "steps": 2}, *STEPS["rtn"]]


def options(name):
    """The options that ask for a grid in its first width, and in small groups where those can be chosen."""
    grid = grid_types()[name]
    bits = 4 if name == "int" else (grid.widths or (8,))[-1]
    return {"type": name, "bits": bits, **({"group_size": 32} if grid.grouped else {})}


def made(name, steps, format_, source="default"):
    return parse(
        {
            "calibration": {"source": source, "samples": 2, "length": 32},
            "steps": [*steps[:-1], {**steps[-1], **options(name)}],
            "output": {"format": format_},
        }
    )


@pytest.fixture(scope="module")
def model(random_model_dir):
    """Matrices of several groups and tiles of every grid, and few of them: fitting some grids takes long."""
    return random_model_dir("llama", num_hidden_layers=1, hidden_size=128, intermediate_size=256)


@pytest.fixture(scope="module")
def rounded(model, tmp_path_factory):
    """rounded(name): the model in a grid, rounded to nearest, in a format that holds its codes."""
    root, done = tmp_path_factory.mktemp("rounded"), {}

    def of(name):
        if name not in done:
            done[name] = compress(model, root / name, made(name, STEPS["rtn"], held(name)))
        return root / name, done[name]

    return of


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Tokens for the model, which has no tokenizer."""
    path = tmp_path_factory.mktemp("text") / "ids.safetensors"
    save(torch.randint(3, 96, (2, 32), generator=torch.Generator().manual_seed(0)), path)
    return str(path)


def holders(name):
    """Formats that have a place for codes of a grid."""
    return [item.name for item in formats().values() if item.holds is not None and name in item.holds]


def held(name):
    """A format that holds what `options` asks for; the grids that checkpoints have options for hold it first."""
    return grid_types()[name].formats[0]


THROUGH = [(name, method) for name in CHOSEN for method in ("rtn", "gptq")]
THROUGH += [("int", "awq"), ("nvfp4", "awq")]  # which scales channels, and rounds as rtn does


@pytest.mark.parametrize(("name", "method"), THROUGH)
def test_a_grid_goes_through_a_method_to_a_checkpoint_that_verifies(name, method, model, text, rounded, tmp_path):
    grid, out = grid_types()[name], tmp_path / "out"
    if method == "rtn":
        out, report = rounded(name)
    else:
        report = compress(model, out, made(name, STEPS[method], held(name), text))
    names = {linear["grid"] for linear in report["linears"]}
    assert len(names) == 1
    spec = spec_named(names.pop())
    assert (spec.type, spec.name) == (name, report["linears"][0]["grid"])
    assert json.loads((out / "report.json").read_text())["linears"] == report["linears"]
    checks = verify(out, model)
    assert passed(checks), [check for check in checks if not check.ok]
    assert grid.label(methods()["rtn"](**options(name)), None) in (f"w{spec.bits}", name, spec.name)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_checkpoint_is_read_as_what_was_written(name, model, rounded, tmp_path):
    """Values are those that the same codes have in `dense`, but for its type of 16 bits."""
    out, _ = rounded(name)
    compress(model, tmp_path / "dense", made(name, STEPS["rtn"], "dense"))
    packed, dense = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "dense"))
    config, module = json.loads((out / "config.json").read_text()), "model.layers.0.mlp.up_proj"
    form = formats()[held(name)]
    coded = form.decode(module, packed.__getitem__, config)
    specs = {item: TensorSpec(item, TYPES[tensor.dtype], tuple(tensor.shape)) for item, tensor in packed.items()}
    assert form.shape(module, specs, packed.__getitem__, config) == tuple(coded.codes.shape)
    assert torch.equal(coded.decode().to(torch.bfloat16), dense[f"{module}.weight"])


@pytest.mark.parametrize("name", CHOSEN)
def test_formats_to_suggest_are_formats_that_hold_the_grid(name):
    assert set(grid_types()[name].formats) <= set(holders(name))


def plainly(name):
    """Rounding to nearest on a grid, its group size resolved."""
    method = methods()["rtn"](**options(name))
    if method.group_size or not method.grid_type.default_group:
        return method
    return method.model_copy(update={"group_size": method.grid_type.default_group})


@pytest.mark.parametrize("name", CHOSEN)
def test_whoever_asks_a_grid_gets_an_answer(name):
    """What methods, formats and loops ask of any grid, on a matrix of two groups."""
    spec = plainly(name).grid
    assert spec_named(spec.name) == spec
    assert spec.groups(256) * spec.width(256) == 256
    assert spec.bits < spec.bits_per_weight(256) < spec.bits + 8
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    hessian = torch.eye(256) + 0.1
    grid = fit(weight, spec)
    codes = grid.encode(weight)
    assert torch.equal(grid.encode(grid.decode(codes)), codes)
    assert torch.equal(grid.codes(grid.levels(codes)), codes)
    gradient = (weight - grid.decode(codes)) @ hessian

    def lost(values):
        return (((values - weight) @ hessian) * (values - weight)).sum(1)

    again = grid.refit_all(codes, hessian, gradient, torch.float16)
    assert (lost(again.decode()) <= lost(grid.decode(codes)) * (1 + 1e-4)).all()
    assert again.grid.numbers(again.codes)
    assert torch.equal(
        grid.stacked([grid.rows(slice(0, 9)), grid.rows(slice(9, 24))]).decode(codes), grid.decode(codes)
    )
    rounded, plain = (fit(weight, spec, clip=clip) for clip in ("search", "minmax"))
    best, worst = ((item.decode(item.encode(weight)) - weight).square().sum() for item in (rounded, plain))
    assert best <= worst


@pytest.mark.parametrize("name", [*CHOSEN, *BLOCK_TYPES])
def test_factors_multiply_values_by_groups_or_are_refused(name):
    """Factors that are powers of two are exact, and no other group moves; others are rounded as scales are stored."""
    spec = BLOCK_TYPES[name] if name in BLOCK_TYPES else plainly(name).grid
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))
    grid = fit(weight, spec)
    codes, index = grid.encode(weight), grid.factor_index
    if index is None:
        assert name not in ("int", "offset", "fp8", *BLOCK_TYPES)
        return
    factors = torch.ones(24, int(index.max()) + 1)
    factors[3, 0], factors[4, -1] = 2.0, 0.5
    values = grid.decode(codes)
    assert torch.equal(grid.multiplied(factors, torch.float16).decode(codes), values * factors[:, index])
    moved = grid.multiplied(factors * 1.1, torch.bfloat16).decode(codes)
    assert torch.allclose(moved, values * factors[:, index] * 1.1, rtol=2**-6, atol=2**-7 * float(values.abs().max()))


def test_a_grid_that_cannot_be_held_is_refused_with_formats_that_hold_it(shallow_model_dir, tmp_path):
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.errors import LlmcompressError

    for name in CHOSEN:
        for format_ in set(formats()) - {"dense", "gguf", *holders(name)}:
            with pytest.raises(LlmcompressError) as found:
                make_plan(made(name, STEPS["rtn"], format_), shallow_model_dir, Options(out=tmp_path / "out"))
            assert found.value.hint
