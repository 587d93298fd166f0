"""Scales and rotations leave every declared architecture's logits as they were, in float64; what is forgotten shows."""

from dataclasses import replace

import pytest
import torch

from llmcompress import arch
from llmcompress.arch.spec import RESIDUAL
from llmcompress.engine.plan.transform_headers import transformed_headers
from llmcompress.engine.source.folding import rotation_folds, scaling_folds
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.open import config_of
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.errors import PlanError
from llmcompress.ledger import Ledger
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.recipe import parse
from llmcompress.registry import discover
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.headers import read_headers
from streaming import ids, streamed_logits

SPECS = discover(arch, "ARCH")
CASES = [(model_type, {}) for spec in SPECS.values() for model_type in spec.model_types] + [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("opt", {"activation_function": "gelu"}),
    ("opt", {"do_layer_norm_before": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
]
NAMES = [f"{name}-{next(iter(options), 'plain')}" for name, options in CASES]


class Wide(Checkpoint):
    """A checkpoint read in float64."""

    def read(self, name):
        return super().read(name).double()


def folding(headers, shared=()):
    return FoldedCheckpoint(Wide(headers), frozenset(headers.tensors), dict(shared))


def anatomy_of(path):
    headers = read_headers(path)
    found = matrices_of(headers, False, Ledger())
    return Anatomy(headers, found.spec, found.prefix, found.layers)


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Nothing is computed in float32 where a model asks for it: norms and softmax do."""
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def keep(self, *args, **options):
        narrow = torch.float32 in (*args, options.get("dtype")) and self.dtype == torch.float64
        return self if narrow else to(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", keep)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: keep(self, torch.float32))
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, **_: softmax(x, dim=dim))


class Runner:
    """Logits in float64 of a model with its tensors changed."""

    def __init__(self, anatomy):
        config = config_of(anatomy.headers, False)
        self.model = StreamedModel(folding(anatomy.headers), config, anatomy.spec, dtype=torch.float64)

    def __call__(self, folds=(), headers=None, shared=()):
        checkpoint = folding(headers or self.model.weights.headers, shared)
        for changes in folds:
            checkpoint.fold(changes)
        self.model.weights = checkpoint
        self.model.__dict__.pop("head_is_tied", None)
        return streamed_logits(self.model, ids(2))


def random_scales(anatomy, skip=None):
    """Changes by random factors at every site of every layer; skip: (site, reader) that is forgotten."""
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for number, site in enumerate(anatomy.sites(layer)):
            factors = torch.rand(site.channels, dtype=torch.float64, generator=generator) * 1.5 + 0.5
            parts = [part for n, part in enumerate(site.parts) if (number, n) != skip]
            yield scaling_folds(anatomy, layer, parts, factors)


def error(found, reference):
    return float((found - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize(("family", "options"), CASES, ids=NAMES)
def test_random_scales_at_every_site_leave_the_logits_as_they_were(random_model_dir, family, options):
    anatomy = anatomy_of(random_model_dir(family, dtype="float32", **options))
    folds = list(random_scales(anatomy))
    assert folds
    run = Runner(anatomy)
    assert error(run(folds), run()) < 1e-9


@pytest.mark.parametrize(("family", "options"), CASES, ids=NAMES)
def test_every_part_of_every_site_matters(random_model_dir, family, options):
    anatomy = anatomy_of(random_model_dir(family, dtype="float32", **options))
    run = Runner(anatomy)
    reference = run()
    for number, site in enumerate(anatomy.sites(1)):
        for forgotten in range(len(site.parts)):
            assert error(run(random_scales(anatomy, (number, forgotten))), reference) > 1e-6, site


SCORES = [case for case in CASES if case[0] not in ("gpt2", "gpt_neox")]


@pytest.mark.parametrize(("family", "options"), SCORES, ids=[f"{name}-{next(iter(o), 'plain')}" for name, o in SCORES])
def test_scaling_keys_against_queries_leaves_the_logits_as_they_were(random_model_dir, family, options):
    anatomy = anatomy_of(random_model_dir(family, dtype="float32", **options))
    run = Runner(anatomy)
    reference = run()
    generator = torch.Generator().manual_seed(1)
    folds, keys, queries = [], [], []
    for layer in range(2):
        site = anatomy.scores(layer)
        heads = max(site.heads, 1)
        half = torch.rand(heads, 1, site.channels // heads // 2, dtype=torch.float64, generator=generator) + 0.5
        factors = half.expand(-1, 2, -1).reshape(-1)  # both channels of a rotated pair alike
        folds.append(scaling_folds(anatomy, layer, site.parts, factors))
        keys.append(scaling_folds(anatomy, layer, [site.writer], factors))
        queries.append(scaling_folds(anatomy, layer, site.readers, factors))
    assert error(run(folds), reference) < 1e-9
    assert error(run(keys), reference) > 1e-6
    assert error(run(queries), reference) > 1e-6


def test_the_sites_are_those_that_each_family_has():
    expected = {"llama": 4, "qwen3": 4, "olmo2": 2, "gemma": 4, "phi3": 4, "gpt2": 3, "gpt_neox": 3, "opt": 4}
    for family, count in expected.items():
        spec = SPECS[family]
        norms = [norm for norm in spec.norms if RESIDUAL not in norm.feeds]
        assert len(norms) + len(spec.flows) == count


def rotation(anatomy, **options):
    recipe = parse({"steps": [{"method": "rotate", **options}, {"method": "rtn"}]})
    headers = transformed_headers(anatomy.headers, recipe, anatomy, Ledger())
    anatomy = replace(anatomy, headers=headers)
    head, embedding = anatomy.outer(anatomy.spec.head), anatomy.outer(anatomy.spec.embed)
    shared = {head: embedding} if head is not None and headers.tensors[head].end == 0 else {}
    return anatomy, rotation_folds(anatomy, recipe.transforms[0], folding(headers, shared)), shared


@pytest.mark.parametrize(("family", "options"), CASES, ids=NAMES)
def test_a_rotation_leaves_the_logits_as_they_were_or_is_refused(random_model_dir, family, options):
    before = anatomy_of(random_model_dir(family, dtype="float32", **options))
    norms = (*before.spec.norms, before.spec.final)
    if any(norm.centred or RESIDUAL in norm.feeds for norm in norms):
        with pytest.raises(PlanError, match=r"cannot be rotated: (its norms subtract the mean|norms stand between)"):
            rotation(before)
        after, folds, shared = rotation(before, residual=False)
    else:
        after, folds, shared = rotation(before)
        assert after.headers.config["tie_word_embeddings"] is False
        assert {name for name, stored in after.headers.tensors.items() if name not in folds and "norm" not in name} <= {
            name for name in after.headers.tensors if name.endswith("bias")
        }
    run = Runner(before)
    reference = run()
    assert error(run([folds], after.headers, shared), reference) < 1e-9
    for name in [name for name in folds if ".1." in name] if options or family in ("llama", "mixtral", "phi3") else []:
        rest = {key: value for key, value in folds.items() if key != name}
        assert error(run([rest], after.headers, shared), reference) > 1e-6, name


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_scales_after_a_rotation_leave_the_logits_as_they_were(random_model_dir, family):
    before = anatomy_of(random_model_dir(family, dtype="float32"))
    after, folds, shared = rotation(before)
    run = Runner(before)
    assert error(run([folds, *random_scales(after)], after.headers, shared), run(headers=before.headers)) < 1e-9
