"""Sites are found and proven by running layers: exactly the declared ones for declared families, and none too many."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from llmcompress import arch
from llmcompress.arch.spec import ArchSpec, Linear
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.errors import CheckpointError
from llmcompress.model.proven_sites import _kinds, prove_sites
from llmcompress.model.site_proof import SiteProof
from llmcompress.model.skeleton import load_config
from llmcompress.model.traced_layer import RandomWeights, TracedLayer, Widened, _multiplied
from llmcompress.registry import discover
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import read_headers
from streaming import observed

CASES = [(model_type, {}) for spec in discover(arch, "ARCH").values() for model_type in spec.model_types] + [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("opt", {"activation_function": "gelu"}),
    ("opt", {"do_layer_norm_before": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
]

SOON = {("llama", ""), ("phi3", ""), ("gemma2", ""), ("gpt_neox", ""), ("mixtral", ""), ("opt", "activation_function")}


def case(family, options):
    """A case that the default suite runs where it is one of a kind."""
    first = next(iter(options), "")
    marks = () if (family, first) in SOON else pytest.mark.slow
    return pytest.param(family, options, id=f"{family}-{first or 'plain'}", marks=marks)


def proven(path):
    spec = observed(path)
    return prove_sites(load_config(path), Checkpoint(path).names(), spec)


def plain(index, count):
    """An index as numbers, those of all channels in order where it says nothing."""
    return tuple(range(count)) if index is None else tuple(np.asarray(index).tolist())


def facts(site, shapes):
    """What a site is, whatever its space is called, and in whatever order its readers come."""
    rows = shapes[site.writer.path][0]
    at = plain(site.writer.at, rows)
    readers = {(part.path, plain(part.spread, site.channels)) for part in site.readers}
    return site.writer.path, at, site.writer.offset, site.norm, site.channels, frozenset(readers)


@pytest.mark.parametrize(("family", "options"), [case(*each) for each in CASES])
def test_the_proof_finds_exactly_the_sites_that_a_family_declares(random_model_dir, family, options):
    path = random_model_dir(family, **options)
    headers, spec = read_headers(path), arch.find(family)
    anatomy = Anatomy(headers, spec, spec.layers, 2)
    found = proven(path)
    for layer in range(2):
        shapes = anatomy.shapes(layer)
        declared = {facts(site, shapes) for site in anatomy.sites(layer)}
        assert declared
        assert {facts(site, shapes) for site in found.sites[layer]} == declared


class FakeModel:
    """A model that calls its layers with hidden states alone."""

    def call(self, number, layer, hidden):
        return layer(hidden)


class Block(nn.Module):
    """A norm, matrices that read it, and a function of what these give that a last matrix reads."""

    def __init__(self, between, writers=("up",), gain=0.0):
        super().__init__()
        self.norm, self.down = nn.LayerNorm(24), nn.Linear(32, 24)
        for name in writers:
            self.add_module(name, nn.Linear(24, 32))
        self.between, self.writers, self.gain = between, writers, gain

    def normalised(self, x):
        states = nn.functional.layer_norm(x, (24,))
        return states * (self.norm.weight + self.gain) + self.norm.bias

    def forward(self, x):
        states = self.normalised(x)
        return x + self.down(self.between(*(self.get_submodule(name)(states) for name in self.writers)))


def proof(layer):
    """The proof for a layer of our own."""
    weights = RandomWeights()
    weights.shapes = {name: value.shape for name, value in layer.named_parameters()}
    for name in weights.shapes:
        owner, _, leaf = name.rpartition(".")
        layer.get_submodule(owner)._parameters[leaf] = nn.Parameter(weights.read(name), requires_grad=False)
    linears = [Linear(name, f"input of {name}") for name, part in layer.named_modules() if isinstance(part, nn.Linear)]
    spec = ArchSpec("fake", ("fake",), tuple(linears), observed=True)
    hidden = torch.randn(1, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return SiteProof(TracedLayer(FakeModel(), 0, layer, hidden), spec)


def written(found):
    return {(site.writer.path, tuple(part.path for part in site.readers)) for site in found.sites}


NORM = ("norm", ("up",))
FLOW = ("up", ("down",))


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda up: up, {NORM, FLOW}),
        (torch.relu, {NORM, FLOW}),
        (nn.functional.leaky_relu, {NORM, FLOW}),
        (nn.functional.gelu, {NORM}),
        (nn.functional.silu, {NORM}),
        (torch.square, {NORM}),
        (lambda up: up + 1e-4, {NORM}),
        (lambda up: up.clamp(-7, 7), {NORM}),
        (lambda up: up.clamp(-500, 500), {NORM}),
        (lambda up: nn.functional.rms_norm(up, (32,)), {NORM}),
        (lambda up: up.flip(-1) * 3, {NORM, FLOW}),
        (lambda up: up.cumsum(1), {NORM, FLOW}),
        (lambda up: up.cumsum(2), {NORM}),
    ],
)
def test_a_matrix_is_scaled_where_what_follows_it_passes_factors_on(between, expected):
    found = proof(Block(between))
    assert written(found) == expected
    assert set(found.refused) == {"down"} - {reader for _, readers in expected for reader in readers}


def test_the_channels_of_a_reader_are_found_in_whatever_order_they_are():
    (_, site) = proof(Block(lambda up: up.roll(3, -1))).sites
    assert (site.spread == np.roll(np.arange(32), 3)).all()


@pytest.mark.parametrize("gain", [0.0, 1.0])
def test_a_gain_may_be_one_more_than_the_weight(gain):
    found = proof(Block(torch.tanh, gain=gain))
    assert [(site.writer.path, site.writer.offset) for site in found.sites] == [("norm", gain)]


def test_a_gain_of_another_kind_is_not_taken_for_one():
    assert not proof(Block(torch.tanh, gain=0.5)).sites


def test_of_a_gate_and_what_it_is_multiplied_with_the_second_is_scaled():
    found = proof(Block(lambda gate, up: torch.sigmoid(gate) * up, ("gate", "up")))
    assert written(found) == {("norm", ("gate", "up")), ("up", ("down",))}


def test_a_norm_whose_output_is_also_added_is_refused_by_name():
    class Added(Block):
        def forward(self, x):
            return super().forward(x) + self.normalised(x)

    found = proof(Added(torch.tanh))
    assert not found.sites
    assert found.refused["up"] == "something that is no matrix also reads what is written by norm"


def test_a_reader_that_is_hidden_in_another_product_is_named():
    class Hidden(Block):
        def __init__(self):
            super().__init__(torch.tanh)
            self.pair = nn.Parameter(torch.empty(2, 24, 24))

        def forward(self, x):
            return super().forward(x) + self.normalised(x) @ self.pair[0] + self.normalised(x) @ self.pair[1]

    found = proof(Hidden())
    assert not found.sites
    assert found.refused["up"] == "pair depends in another way on what is written by norm"


def test_a_weight_that_is_also_used_otherwise_is_not_scaled():
    class Absorbed(Block):
        def forward(self, x):
            return super().forward(x) + self.up.weight.sum()

    assert not proof(Absorbed(torch.relu)).sites


def test_nothing_is_scaled_past_a_matrix_that_never_ran():
    layer = Block(torch.relu)
    layer.rare = nn.Linear(24, 24)
    found = proof(layer)
    assert not found.sites
    assert found.refused["up"] == "rare did not run and may read what is written by norm"


def test_what_other_layers_may_see_counts():
    class Sharing(Block):
        def forward(self, x):
            states = self.up(self.normalised(x))
            return x + self.down(states), states

    assert written(proof(Sharing(None))) == {NORM}


@pytest.mark.parametrize("shape", [(40, 70), (3000, 700), (700, 3000)])
def test_products_with_weights_that_take_no_memory_are_those_of_ordinary_matrices(shape):
    weights = RandomWeights()
    weights.shapes["w"] = torch.Size(shape)
    weight = weights.read("w")
    assert weight.untyped_storage().size() < 8 * 3 * sum(shape)
    x = torch.randn(2, 5, shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_multiplied(x, weight), x @ weight.contiguous(), rtol=0, atol=1e-11)
    torch.testing.assert_close(
        _multiplied(_multiplied(x, weight), weight.T),
        x @ weight.contiguous() @ weight.T.contiguous(),
        rtol=0,
        atol=1e-9,
    )


def test_nothing_is_computed_in_less_than_float64():
    x = torch.randn(5, dtype=torch.float64)
    with Widened():
        for value in (x.float(), x.to(torch.float32), x.to(dtype=torch.bfloat16), x.type(torch.float16), x.half()):
            assert torch.equal(value, x)
        assert torch.equal(torch.softmax(x, 0, dtype=torch.float32), torch.softmax(x, 0))


def test_layers_are_of_one_kind_only_where_they_are_built_and_set_alike():
    layers = [Block(torch.relu) for _ in range(4)]
    for number, layer in enumerate(layers):
        layer.layer_idx = number
    layers[2].shares_keys = True
    layers[3].extra = nn.Linear(24, 24)
    spec = ArchSpec("toy", ("toy",), ())
    assert _kinds(layers, spec) == [[0, 1], [2], [3]]
    assert _kinds(layers, replace(spec, idle={1: frozenset({"up"})})) == [[0], [1], [2], [3]]


def test_layers_that_cannot_be_run_are_refused_in_one_line(random_model_dir):
    path = random_model_dir("starcoder2", num_attention_heads=4, num_key_value_heads=2)
    spec, config = observed(path), load_config(path)
    config.num_key_value_heads = 3
    with pytest.raises(CheckpointError, match="layers of a 'starcoder2' model could not be run on random weights"):
        prove_sites(config, Checkpoint(path).names(), spec)
