"""Where channels of a layer can be scaled without changing what the layer computes, from its family's declaration.

What writes the channels of a space is divided by a factor per channel, what reads them multiplied by it. Everything
here is index arithmetic on shapes: no tensor is touched.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from llmcompress.arch.scaling_site import Index, Site, SitePart
from llmcompress.arch.spec import RESIDUAL, ArchSpec, Flow, Linear, attention_heads

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

SCORES = "scores"  # the space where queries and keys meet


def sites(spec: ArchSpec, config: Mapping[str, Any], shapes: Shapes) -> list[Site]:
    """All sites of a layer in order of declaration: norms, then flows.

    shapes: of the weights of one layer by module path, matrices [out, in]. Paths that a layer lacks are passed over.
    """
    experts = spec.expert_count(config)
    found = []
    for norm in spec.norms:
        if norm.path in shapes and RESIDUAL not in norm.feeds and _holds(norm.when, config):
            readers = tuple(SitePart(path, inputs=True) for path in _readers(spec, norm.feeds, experts, shapes))
            if readers:
                writer = SitePart(norm.path, divided=True, offset=norm.offset)
                found.append(Site(norm.feeds[0], shapes[norm.path][0], writer, readers, norm=True))
    for flow in spec.flows:
        if _holds(flow.when, config):
            numbers = range(experts) if "{e}" in flow.source else (None,)
            for number in numbers:
                site = _flow(spec, flow, number, config, shapes)
                if site is not None:
                    found.append(site)
    return found


def scores_site(spec: ArchSpec, config: Mapping[str, Any], shapes: Shapes) -> Site | None:
    """Queries and keys of a layer: keys are divided, the queries that meet them multiplied; None where it has none.

    What is multiplied are outputs: there is nothing that reads them. Where norms of one weight for all heads follow the
    matrices, it is those that are scaled, and all heads alike.
    """
    counts, scores = attention_heads(config), spec.scores
    if counts is None or scores is None or scores.query not in shapes:
        return None
    queries, pairs = counts if spec.grouped_queries else (counts[0], counts[0])
    query, key = scores.norms if scores.norms is not None and scores.norms[0] in shapes else (scores.query, scores.key)
    rows = shapes[scores.query][0]
    size = rows // (queries + 2 * pairs if scores.query == scores.key else queries)
    fused = query == key
    at_query = np.arange(queries * size) if fused else None
    at_key = np.arange(queries * size, (queries + pairs) * size) if fused else None
    offset = 0.0 if query == scores.query else scores.offset
    if shapes[query] == (size,):
        return Site(SCORES, size, SitePart(key, divided=True, offset=offset), (SitePart(query, offset=offset),))
    channels = pairs * size
    spread = _of_queries(queries, pairs, size)
    writer = SitePart(key, divided=True, at=at_key, offset=offset)
    return Site(SCORES, channels, writer, (SitePart(query, at=at_query, spread=spread, offset=offset),), heads=pairs)


def residual_readers(spec: ArchSpec, config: Mapping[str, Any], shapes: Shapes) -> list[str]:
    """Matrices of a layer that read the hidden states through a norm."""
    return [part.path for site in sites(spec, config, shapes) if site.norm for part in site.readers]


def residual_writers(spec: ArchSpec, config: Mapping[str, Any], shapes: Shapes) -> list[str]:
    """Matrices of a layer whose outputs are added to the hidden states."""
    return [
        path
        for linear in spec.linears
        if linear.adds
        for _, path, _ in spec.expand(linear, spec.expert_count(config))
        if path in shapes
    ]


def _holds(when: tuple[str, Any] | None, config: Mapping[str, Any]) -> bool:
    return when is None or config.get(when[0], when[1]) == when[1]  # a key that is not written has its default


def _readers(spec: ArchSpec, spaces: Iterable[str], experts: int, shapes: Shapes) -> list[str]:
    """Module paths of all that reads one of `spaces`, also what is never quantised."""
    wanted = set(spaces)
    every: tuple[Linear, ...] = (*spec.never, *spec.linears)
    return [
        path
        for linear in every
        if linear.reads in wanted
        for _, path, _ in spec.expand(linear, experts)
        if path in shapes
    ]


def _flow(spec: ArchSpec, flow: Flow, number: int | None, config: Mapping[str, Any], shapes: Shapes) -> Site | None:
    source = flow.source.format(e=number)
    target = flow.target.format(e=number)
    linears = [linear for linear in spec.linears if linear.reads == flow.target]
    readers = [path for linear in linears if (path := linear.path.format(e=number)) in shapes]
    if source not in shapes or not readers:
        return None
    rows, width = shapes[source][0], shapes[readers[0]][1]
    if not flow.heads:
        at = None if flow.rows == "all" else np.arange(rows - width, rows)
        return Site(
            target, width, SitePart(source, divided=True, at=at), tuple(SitePart(path, inputs=True) for path in readers)
        )
    counts = attention_heads(config)
    if counts is None:
        return None
    queries, pairs = counts if spec.grouped_queries else (counts[0], counts[0])
    size = width // queries
    channels = pairs * size
    spread = _of_queries(queries, pairs, size)
    writer = SitePart(source, divided=True, at=_rows_of_heads(flow, rows, channels, size))
    return Site(target, channels, writer, tuple(SitePart(path, True, spread=spread) for path in readers), heads=pairs)


def _of_queries(queries: int, pairs: int, size: int) -> Index:
    """For each channel of all query heads the number of the key-value channel that it meets."""
    return np.tile(np.arange(pairs * size).reshape(pairs, 1, size), (1, queries // pairs, 1)).reshape(-1)


def _rows_of_heads(flow: Flow, rows: int, channels: int, size: int) -> Index | None:
    if flow.rows == "last":
        return np.arange(rows - channels, rows)
    if flow.rows == "third of heads":
        return np.arange(rows).reshape(-1, 3, size)[:, 2].reshape(-1)
    return None
