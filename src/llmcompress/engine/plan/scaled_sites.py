"""Where a plan scales the channels of a model whose family is not declared: sites that were proven, or a refusal."""

from collections import Counter
from collections.abc import Set
from dataclasses import replace

from llmcompress.arch.scaling_site import Site
from llmcompress.engine.source.matrix_refs import Matrices
from llmcompress.engine.source.open import config_of
from llmcompress.errors import PlanError
from llmcompress.ledger import Ledger
from llmcompress.recipe import Recipe
from llmcompress.store.headers import ModelHeaders
from llmcompress.transforms.base import Scaling


def with_sites(
    headers: ModelHeaders, matrices: Matrices, recipe: Recipe, trust_remote_code: bool, ledger: Ledger
) -> Matrices:
    """The matrices with the sites of their layers, where the recipe scales channels of an observed family.

    The ledger names each matrix whose inputs are not scaled. PlanError where there is nothing to scale.
    """
    steps = [step for step in recipe.transforms if isinstance(step, Scaling)]
    if not matrices.spec.observed or not steps:
        return matrices
    from llmcompress.model.proven_sites import prove_sites

    spec = matrices.spec
    found = prove_sites(config_of(headers, trust_remote_code), headers.tensors, spec, trust_remote_code)
    anatomy = matrices.anatomy(headers)
    absent = {
        part.path
        for layer, sites in found.sites.items()
        for site in sites
        for part in site.parts
        if anatomy.tensor(layer, part.path) is None
    }
    kept: dict[int, tuple[Site, ...]] = {}
    refused: Counter[tuple[str, str]] = Counter()
    for layer, sites in found.sites.items():
        lacking = {site.space: path for site in sites if (path := _one_of(site, absent)) is not None}
        kept[layer] = tuple(site for site in sites if site.space not in lacking)
        refused.update(found.refused[layer].items())
        refused.update(
            (part.path, f"not every layer has a tensor of its own of {lacking[site.space]}")
            for site in sites
            if site.space in lacking
            for part in site.readers
        )
    for step in steps:
        if not any(step.wants(site.norm) for sites in kept.values() for site in sites):
            path, why = next(iter(refused), ("its layers", "no norm and no matrix writes them channel by channel"))
            raise PlanError(
                f"{step.name} finds no place in a {spec.name!r} model where channels can be scaled; {path}: {why}",
                "leave the step out",
            )
    for (path, why), count in refused.items():
        ledger.note("unscaled", path, f"in {count} of {matrices.layers} layers: {why}")
    return replace(matrices, spec=replace(spec, proven=kept))


def _one_of(site: Site, paths: Set[str]) -> str | None:
    """The first module of a site that is among `paths`."""
    return next((part.path for part in site.parts if part.path in paths), None)
