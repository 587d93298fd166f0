"""Which GGUF files of a directory are one model."""

import pytest

from llmcompress.errors import CheckpointError
from llmcompress.validate.gguf_file import gguf_in


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (["m.gguf"], "m.gguf"),
        (["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"], "m-00001-of-00002.gguf"),
        (["m-00001-of-00001.gguf", "readme.md"], "m-00001-of-00001.gguf"),
        (["m.gguf", "config.json"], None),
        ([], None),
    ],
)
def test_the_model_of_a_directory_is_its_file_or_the_first_of_its_shards(names, meant, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    assert gguf_in(tmp_path) == (meant and tmp_path / meant)


@pytest.mark.parametrize(
    "names", [["a.gguf", "b.gguf"], ["m.gguf", "m-00001-of-00002.gguf"], ["m-1-of-2.gguf", "m-2-of-2.gguf"]]
)
def test_files_that_are_not_shards_of_one_model_are_several(names, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="several GGUF files"):
        gguf_in(tmp_path)
