"""Grids by a budget: kept to the byte, near what is measured, better than one for all, refused where they must be."""

import json
import re
import shutil
from itertools import product

import pytest
import torch
import yaml

from llmcompress.engine.budget import grid_losses, group_losses
from llmcompress.engine.budget.fisher_window import WindowSplit
from llmcompress.engine.budget.fit_to_size import Budget
from llmcompress.engine.budget.matrix_grids import GridFitRequest, fitted_to_grids
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.formats.entry_checks import fused
from llmcompress.recipe import load, parse
from llmcompress.store.sealed import sealed, unsealed
from llmcompress.validate.session import Request, evaluate_paths
from madetokenizers import byte_level, save

TEXT = {"source": "default", "samples": 16, "length": 128}
BITS, SIZES = (2, 3, 4, 8), (32, 128)


def recipe(form="gptq", method="gptq", samples=16, **options):
    text = {**TEXT, "samples": samples}
    return parse({"calibration": text, "steps": [{"method": method, **options}], "output": {"format": form}})


def fitted(
    model,
    made,
    tmp_path,
    kept=None,
    size=None,
    bpw=None,
    kl=None,
    bits=BITS,
    sizes=SIZES,
    types=("int",),
    threads=1,
    **resources,
):
    options = Options(out=tmp_path / "out", threads=threads, **resources)
    return fitted_to_grids(made, model, options, GridFitRequest(Budget(size, bpw), bits, sizes, kl, kept, types))


def write(made, model, out):
    run(make_plan(made, model, Options(out=out, threads=1)))
    return out


def measured(out, model):
    request = Request(out, model, "default", 128, 16, 4, "cpu", "float32")
    return evaluate_paths(request, lambda done, of: None)


@pytest.fixture(scope="module")
def kept(tiny_model_dir, tmp_path_factory):
    """Losses of the tiny model under gptq, measured once."""
    folder = tmp_path_factory.mktemp("kept")
    fitted(tiny_model_dir, recipe(), folder, folder / "kept.json", bpw=8)
    return folder / "kept.json"


@pytest.fixture
def unmeasured(monkeypatch):
    """Whatever measures now fails."""
    monkeypatch.setattr(group_losses, "measured_losses", None)


@pytest.fixture(scope="module")
def random_model(random_model_dir, tmp_path_factory):
    """random_model(family, **config): one with random weights and a tokenizer."""

    def make(family, **config):
        path = tmp_path_factory.mktemp(family) / "model"
        shutil.copytree(random_model_dir(family, vocab_size=288, **config), path)
        return save(byte_level(), path)

    return make


def weight_bytes(out):
    return sum(file.stat().st_size for file in out.iterdir() if ".safetensors" in file.name)


def test_it_is_closer_than_one_grid_and_what_it_expects_is_near(tiny_model_dir, kept, unmeasured, tmp_path):
    found = fitted(tiny_model_dir, recipe(), tmp_path, kept, bpw=3.5)
    mixed = measured(write(found.recipe, tiny_model_dir, tmp_path / "mixed"), tiny_model_dir)
    plain = measured(write(recipe(bits=3, group_size=32), tiny_model_dir, tmp_path / "plain"), tiny_model_dir)
    report = json.loads((tmp_path / "mixed" / "report.json").read_text())
    assert 3.45 < report["bits_per_quantised_weight"] <= 3.5
    assert mixed["kl"] < 0.7 * plain["kl"]
    assert mixed["kl_expected"] == report["recipe"]["expected"]["kl"] == found.recipe.expected.kl
    assert 0.6 < mixed["kl_expected"] / mixed["kl"] < 1.6
    assert "kl_expected" not in plain


def test_what_each_matrix_is_expected_to_lose_is_near_what_is_measured(tiny_model_dir, kept, tmp_path):
    losses = json.loads(kept.read_text())["losses"]
    for place, grid in (("0.self_attn.k_proj", (3, 32)), ("1.mlp.up_proj", (3, 128)), ("3.mlp.down_proj", (2, 32))):
        rest = {"*": {"skip": True}, f"layers.{place}": {"skip": False}}
        alone = recipe("dense", bits=grid[0], group_size=grid[1], qep_alpha=0, set=rest)
        kl = measured(write(alone, tiny_model_dir, tmp_path / place), tiny_model_dir)["kl"]
        assert 0.5 < losses[f"model.layers.{place}"]["int{}-g{}-sym".format(*grid)] / kl < 2, place


@pytest.mark.parametrize(("form", "method"), [("gptq", "gptq"), ("compressed-tensors", "rtn")])
def test_the_promised_size_is_that_of_the_files(form, method, tiny_model_dir, kept, tmp_path):
    losses = kept if method == "gptq" else tmp_path / "rtn.json"
    least = fitted(tiny_model_dir, recipe(form, method), tmp_path, losses, bpw=2.2).recipe.expected.output_bytes
    size = least + 150_001
    found = fitted(tiny_model_dir, recipe(form, method), tmp_path, losses, size=size)
    out = write(found.recipe, tiny_model_dir, tmp_path / "written")
    assert size - 40_000 < weight_bytes(out) <= size
    assert weight_bytes(out) == found.recipe.expected.output_bytes


def test_a_divergence_takes_the_smallest_size(tiny_model_dir, kept, unmeasured, tmp_path):
    sizes = {}
    for kl in (0.002, 0.006, 0.02):
        found = fitted(tiny_model_dir, recipe(), tmp_path, kept, kl=kl)
        assert 0.9 * kl < found.recipe.expected.kl <= kl
        sizes[kl] = found.recipe.expected.output_bytes
        with pytest.raises(PlanError, match=r"is not possible within --size .*: it takes"):
            fitted(tiny_model_dir, recipe(), tmp_path, kept, kl=kl, size=sizes[kl] - 1)
        # the other way round: no result of that size is expected to be closer by more than the last step
        back = fitted(tiny_model_dir, recipe(), tmp_path, kept, size=sizes[kl]).recipe.expected.kl
        assert 0.9 * kl < back <= 1.02 * kl
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    with pytest.raises(PlanError, match=r"--kl 1e-09 is not possible: of the largest grids .* is expected"):
        fitted(tiny_model_dir, recipe(), tmp_path, kept, kl=1e-9)


def test_less_than_the_smallest_size_is_refused_with_what_is_possible(tiny_model_dir, kept, unmeasured, tmp_path):
    for asked in ({"size": 1000}, {"bpw": 2.1}):
        with pytest.raises(PlanError, match="is not possible: the smallest grids make ") as error:
            fitted(tiny_model_dir, recipe(), tmp_path, **asked)
        words = error.value.hint.split()
        size, bpw = float(words[words.index("--size") + 1]), float(words[words.index("--bpw") + 1])
        for possible in ({"size": round(size * 1e9)}, {"bpw": bpw}):
            fitted(tiny_model_dir, recipe(), tmp_path, kept, **possible)


def test_the_best_combination_is_found_among_those_that_the_runtime_can_fuse(random_model, tmp_path):
    """Every combination of grids of one layer, with q, k, v alike and gate, up alike, tried one by one."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = random_model("llama", **wide)
    kept, made = tmp_path / "kept.json", recipe("compressed-tensors", samples=4)
    resources = {"target": "vllm", "kept": kept, "bits": (4, 8), "sizes": (32, 128)}
    fitted(model, made, tmp_path, bpw=8, **resources)
    data = unsealed(kept.read_bytes())
    noise = torch.Generator().manual_seed(3)
    for losses in data["losses"].values():  # of random weights all are alike
        factor = 10 ** (2 * float(torch.rand(1, generator=noise)))
        losses.update({grid: loss * factor for grid, loss in losses.items()})
    kept.write_bytes(sealed(data))
    grids = {"int4-g32-sym": 4.5, "int4-g128-sym": 4.125, "int8-g32-sym": 8.5, "int8-g128-sym": 8.125}
    leaves = [["q", "k", "v"], ["o"], ["gate", "up"], ["down"]]
    names = [[name for name in data["losses"] if name.split(".")[-1][:-5] in part] for part in leaves]
    found = fitted(model, made, tmp_path, bpw=8.5, **resources).plan
    weights = {m.module: m.entry.out_features * m.entry.in_features for layer in found.layers for m in layer}
    table = []
    for chosen in product(grids, repeat=4):
        pairs = [(name, grid) for part, grid in zip(names, chosen, strict=True) for name in part]
        bits = sum(weights[name] * grids[grid] for name, grid in pairs) / sum(weights.values())
        table.append((bits, sum(data["losses"][name][grid] for name, grid in pairs)))
    for budget in (4.125, 4.3, 4.6, 5.0, 5.7, 6.4, 7.5, 8.2):
        fit = fitted(model, made, tmp_path, bpw=budget, **resources)
        best = min(loss for bits, loss in table if bits <= budget)
        assert fit.plan.estimate.bits_per_quantised_weight <= budget
        assert best <= fit.recipe.expected.kl * (1 + 1e-5)
        assert fit.recipe.expected.kl <= best * 1.25
        for members in fused(fit.plan.entries).values():
            assert len({entry.grid for entry in members}) == 1


def test_floats_of_several_types_are_chosen_and_beat_the_one_that_most_have(tiny_model_dir, tmp_path):
    """NVFP4 where it does and FP8 where it matters: between both in size, below NVFP4 in what is measured."""
    made = recipe("compressed-tensors")
    fit = fitted(tiny_model_dir, made, tmp_path, types=("nvfp4", "fp8"), bpw=5.5, target="vllm")
    assert {chosen.grid.name for chosen in fit.losses} == {"nvfp4", "fp8-row"}
    assert 5 < fit.plan.estimate.bits_per_quantised_weight <= 5.5
    mixed = measured(write(fit.recipe, tiny_model_dir, tmp_path / "mixed"), tiny_model_dir)
    alone = measured(
        write(recipe("compressed-tensors", type="nvfp4"), tiny_model_dir, tmp_path / "nvfp4"), tiny_model_dir
    )
    assert mixed["kl"] < 0.7 * alone["kl"]
    assert 0.6 < mixed["kl"] / fit.recipe.expected.kl < 1.6
    for members in fused(fit.plan.entries).values():
        assert len({entry.grid for entry in members}) == 1


def test_experts_of_a_layer_share_a_grid(random_model, tmp_path):
    model = random_model("mixtral")
    found = fitted(model, recipe(samples=4), tmp_path, bpw=4, sizes=(32,))
    grids = {}
    for layer in found.plan.layers:
        for matrix in layer:
            if matrix.expert is not None:
                grids.setdefault((matrix.layer, matrix.path.rpartition(".")[2]), set()).add(matrix.entry.grid)
    assert len(grids) == 6
    assert all(len(kinds) == 1 for kinds in grids.values())


def test_the_recipe_runs_as_it_is_and_repeats_itself(tiny_model_dir, kept, unmeasured, tmp_path):
    first = fitted(tiny_model_dir, recipe(), tmp_path, kept, bpw=3.2)
    text = first.recipe.as_yaml()
    (tmp_path / "recipe.yaml").write_text(text)
    assert load(tmp_path / "recipe.yaml") == first.recipe
    assert fitted(tiny_model_dir, recipe(), tmp_path, kept, bpw=3.2).recipe.as_yaml() == text
    plan = make_plan(load(tmp_path / "recipe.yaml"), tiny_model_dir, Options(out=tmp_path / "again"))
    assert plan.entries == first.plan.entries
    assert len(yaml.safe_load(text)["steps"][0]["set"]) < 28  # fewer patterns than matrices


def test_windows_are_held_back_and_what_is_expected_lies_between_both_kinds_of_loss():
    assert [WindowSplit.of(windows, later) for windows, later in ((16, 128), (16, 16), (3, 3), (1, 1))] == [
        (12, 4, 128),
        (12, 4, 16),
        (2, 1, 3),
        (1, 0, 1),
    ]
    assert WindowSplit.of(128, 128) == (112, 16, 128)
    split = WindowSplit.of(128, 128)
    assert [window for window in range(128) if split.judges(window)] == [*range(16), *range(112, 128)]
    assert (split.judging, WindowSplit.of(16, 16).judging) == (32, 16)
    true, gap = 5.0, 24.0  # l and c of l - c / n inside and l + c / n outside
    for later in (16, 64, 128):
        inside, outside = torch.tensor(true - gap / 12), torch.tensor(true + gap / 12)
        assert float(WindowSplit.of(16, later).expected(inside, outside)) == pytest.approx(true + gap / later)


def test_what_is_expected_of_least_squares_is_what_it_misses_elsewhere():
    """Least squares on random inputs, where both kinds of loss are known: what is expected is unbiased."""
    generator = torch.Generator().manual_seed(0)
    wide, fitted_to, later, trials = 12, 96, 128, 200
    found, truth = 0.0, 0.0
    for _ in range(trials):
        x, y = (torch.randn(later + 500, n, generator=generator, dtype=torch.float64) for n in (wide, 1))
        half, full = (torch.linalg.lstsq(x[:n], y[:n]).solution for n in (fitted_to, later))
        missed = (x @ half - y).square()
        inside, outside = missed[:fitted_to].mean(), missed[later:].mean()
        found += float(WindowSplit(fitted_to, later - fitted_to, later).expected(inside, outside)) / trials
        truth += float((x[later:] @ full - y[later:]).square().mean()) / trials
    assert found == pytest.approx(truth, rel=0.02)


@pytest.mark.slow
def test_the_number_of_threads_changes_nothing(tiny_model_dir, kept, tmp_path):
    one = fitted(tiny_model_dir, recipe(), tmp_path, kept, bpw=4)
    two = fitted(tiny_model_dir, recipe(), tmp_path, tmp_path / "two.json", bpw=4, threads=2)
    assert (tmp_path / "two.json").read_bytes() == kept.read_bytes()
    assert one.recipe == two.recipe
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.json"]


def test_what_set_names_stays(tiny_model_dir, kept, unmeasured, tmp_path):
    said = {"self_attn.o_proj": {"bits": 8}, "layers.2.*": {"group_size": 128}, "0.mlp.up_proj": {"skip": True}}
    found = fitted(tiny_model_dir, recipe(set=said), tmp_path, kept, bpw=4)
    grids = {entry.module: entry.grid for entry in found.plan.entries if entry.linear and entry.block}
    assert grids["model.layers.0.mlp.up_proj"] is None
    assert {grid.bits for name, grid in grids.items() if "o_proj" in name} == {8}
    assert {grid.group_size for name, grid in grids.items() if ".2." in name} == {128}
    assert len(set(grids.values())) > 4


def test_rtn_is_measured_without_compensation(tiny_model_dir, kept, tmp_path):
    mine = tmp_path / "rtn.json"
    fitted(tiny_model_dir, recipe(method="rtn"), tmp_path, mine, bpw=5, bits=(4,))
    with pytest.raises(PlanError, match="holds no losses of this method"):
        fitted(tiny_model_dir, recipe(method="rtn"), tmp_path, kept, bpw=4)
    plain, compensated = (json.loads(file.read_text())["losses"] for file in (mine, kept))
    assert all(plain[name]["int4-g32-sym"] > compensated[name]["int4-g32-sym"] for name in plain)


@pytest.mark.parametrize(
    "options", [{"percdamp": 0.9}, {"descent": 0}, {"guided": True}, {"set": {"mlp.*": {"actorder": "none"}}}]
)
def test_losses_hang_on_how_matrices_are_rounded(options, tiny_model_dir, kept, unmeasured, tmp_path):
    with pytest.raises(PlanError, match="holds no losses of this method"):
        fitted(tiny_model_dir, recipe(**options), tmp_path, kept, bpw=4)


@pytest.mark.parametrize("options", [{"qep_alpha": 0.0}, {"set": {"layers.2.*": {"group_size": 128}}}])
def test_losses_serve_runs_that_round_alike(options, tiny_model_dir, kept, unmeasured, tmp_path):
    assert fitted(tiny_model_dir, recipe(**options), tmp_path, kept, bpw=4).recipe.expected.kl > 0


@pytest.mark.parametrize(
    ("form", "target", "bits", "what"),
    [
        ("awq", None, (3, 4), "widths cannot be mixed: an awq checkpoint has one grid"),
        ("gptq", "transformers", BITS, "widths cannot be mixed: transformers does not load this: it takes one setting"),
        ("compressed-tensors", "llama.cpp", BITS, "widths cannot be mixed: llama.cpp's converter does not load"),
        ("compressed-tensors", "llama.cpp", (3, 5), "it reads 2, 4 and 8 bits"),
        ("gptq", "sglang", (4, 8), "sglang"),
        ("bitsandbytes", None, BITS, "format bitsandbytes cannot hold int"),
        ("gguf", None, BITS, "types of GGUF are fitted to a size by another command"),
        ("gptq", None, (5, 6), "cannot hold int5"),
        ("qoq", "vllm", BITS, "cannot hold int|does not read format qoq"),
    ],
)
def test_who_cannot_mix_is_refused_before_measuring(form, target, bits, what, tiny_model_dir, unmeasured, tmp_path):
    made, place = recipe("gptq"), tmp_path
    made = made.model_copy(update={"output": made.output.model_copy(update={"format": form})})
    if target == "sglang":  # takes it: nothing is refused but what measures
        with pytest.raises(TypeError):
            fitted(tiny_model_dir, made, place, bpw=8, bits=bits, target=target)
        return
    with pytest.raises(PlanError, match=what):
        fitted(tiny_model_dir, made, place, bpw=8, bits=bits, target=target)


def test_dense_files_know_no_size_but_bits(tiny_model_dir, kept, unmeasured, tmp_path):
    with pytest.raises(PlanError, match="files of format dense are of one size"):
        fitted(tiny_model_dir, recipe("dense"), tmp_path, kept, size=10**7)
    assert fitted(tiny_model_dir, recipe("dense"), tmp_path, kept, bpw=4).recipe.expected.bits_per_quantised_weight <= 4
    expected = fitted(tiny_model_dir, recipe("dense"), tmp_path, kept, kl=0.004).recipe.expected
    assert (0.0036 < expected.kl <= 0.004, 2.2 < expected.bits_per_quantised_weight < 5) == (True, True)
    with pytest.raises(PlanError, match="only one grid for each matrix"):
        fitted(tiny_model_dir, recipe("dense"), tmp_path, kept, bpw=4, bits=(4,), sizes=(32,))


@pytest.mark.parametrize("damage", ["model", "text", "a matrix", "a grid", "a number"])
def test_sensitivities_of_something_else_are_refused(damage, tiny_model_dir, kept, unmeasured, tmp_path):
    data = unsealed(kept.read_bytes())
    name = "model.layers.1.mlp.up_proj"
    if damage in data:
        data[damage] = "0" * 64
    elif damage == "a matrix":
        data["losses"].pop(name)
    elif damage == "a grid":
        data["losses"][name].pop("int3-g32-sym")
    else:
        data["losses"][name]["int3-g32-sym"] = float("nan")
    file = tmp_path / "kept.json"
    file.write_bytes(sealed(data))
    with pytest.raises(PlanError, match=r"kept\.json (holds no losses of this|lacks losses of)"):
        fitted(tiny_model_dir, recipe(), tmp_path, file, bpw=4)


def outside_of(made, module):
    """What the step of a recipe says of a module outside of the layers."""
    return made.method.set.get(module)


def test_a_head_that_the_runtime_reads_is_part_of_the_budget(random_model, tmp_path):
    """The smallest result has codes in the head, the largest none; the files are as large as was said."""
    model = random_model("llama", tie_word_embeddings=False, hidden_size=64, intermediate_size=128)
    made, losses = recipe("compressed-tensors", "rtn", samples=2), tmp_path / "losses.json"
    asked = {"bits": (4, 8), "sizes": (32,), "target": "transformers"}
    with pytest.raises(PlanError, match="the smallest grids make") as raised:
        fitted(model, made, tmp_path, losses, size=1000, **asked)
    least = int(re.search(r"make ([\d,]+) bytes", raised.value.message)[1].replace(",", ""))
    small = fitted(model, made, tmp_path, losses, size=least, **asked)
    assert outside_of(small.recipe, "lm_head") == {"skip": False, "type": "int", "bits": 4, "group_size": 32}
    assert weight_bytes(write(small.recipe, model, tmp_path / "small")) == small.recipe.expected.output_bytes <= least
    large = fitted(model, made, tmp_path, losses, size=10**9, **asked)
    assert outside_of(large.recipe, "lm_head") is None
    assert large.recipe.expected.kl < small.recipe.expected.kl
    mean = fitted(model, made, tmp_path, losses, bpw=4.5, **asked)  # of what is quantised anyway
    assert outside_of(mean.recipe, "lm_head") is None
    said = recipe("compressed-tensors", "rtn", samples=2, set={"lm_head": {"skip": True}})
    with pytest.raises(PlanError, match="the smallest grids make"):
        fitted(model, said, tmp_path, size=least, **asked)
    with pytest.raises(PlanError, match="the smallest grids make"):  # SGLang was not seen to read codes of a head
        fitted(model, made, tmp_path, size=least, bits=(4, 8), sizes=(32,))


def test_what_a_tied_head_is_expected_to_lose_is_near_what_is_measured(tiny_model_dir, tmp_path):
    """Both uses of the table count; MLX alone reads its codes."""
    made = recipe("mlx", "rtn", type="offset")
    fitted(
        tiny_model_dir,
        made,
        tmp_path,
        tmp_path / "losses.json",
        size=10**9,
        types=("offset",),
        bits=(3, 4),
        sizes=(64,),
    )
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]["model.embed_tokens"]
    for bits in (3, 4):
        only = {"*": {"skip": True}, "model.embed_tokens": {"skip": False, "bits": bits, "group_size": 64}}
        alone = recipe("mlx", "rtn", type="offset", set=only)
        kl = measured(write(alone, tiny_model_dir, tmp_path / str(bits)), tiny_model_dir)["kl"]
        assert 0.5 < losses[f"int{bits}-g64-offset"] / kl < 2, bits


def test_losses_of_a_head_outlast_a_stop(random_model, tmp_path, monkeypatch):
    """A start that finds the gradients at the last layer there looks at the head anew."""
    model = random_model("llama", tie_word_embeddings=False, hidden_size=64, intermediate_size=128)
    made = recipe("compressed-tensors", "rtn", samples=2)
    asked = {"size": 10**9, "bits": (4, 8), "sizes": (32,), "target": "transformers"}
    fitted(model, made, tmp_path, tmp_path / "whole.json", **asked)
    finish, layers = grid_losses._Rounding.finish, []

    def stopped(self, blind):
        layers.append(self)
        if len(layers) == 2:
            raise KeyboardInterrupt
        return finish(self, blind)

    monkeypatch.setattr(grid_losses._Rounding, "finish", stopped)
    with pytest.raises(KeyboardInterrupt):
        fitted(model, made, tmp_path, tmp_path / "stopped.json", **asked)
    fitted(model, made, tmp_path, tmp_path / "stopped.json", **asked)
    assert (tmp_path / "stopped.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
