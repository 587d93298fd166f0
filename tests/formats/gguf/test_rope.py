"""Rotary embeddings of config.json are those that transformers takes, also where keys are left out."""

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.family import known_types
from llmcompress.formats.gguf.rope import read_rope

KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base",
        "rope_local_base_freq"}  # fmt: skip
ROTARY = sorted(kind for kind, family in known_types().items() if family.rotary and kind in CONFIG_MAPPING)


def read(kind, config):
    family = known_types()[kind]
    return read_rope({**family.defaults, **family.meant(config)})


@pytest.mark.parametrize("kind", ROTARY)
def test_keys_that_are_left_out_are_those_of_the_model_type(kind):
    bare = {key: value for key, value in AutoConfig.for_model(kind).to_dict().items() if key not in KEYS}
    whole = CONFIG_MAPPING[kind].from_dict(dict(bare)).to_dict()
    known = read(kind, whole)
    try:
        found = read(kind, bare)
    except CheckpointError:  # these have to say it
        assert (known.kind, known.local_theta) != ("default", None)
        return
    assert (found.theta, found.local_theta, found.kind, found.partial) == (
        known.theta,
        known.local_theta,
        known.kind,
        known.partial,
    )


def test_most_types_need_not_say_how_they_rotate():
    assert len(ROTARY) > 60
