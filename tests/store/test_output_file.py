"""A GGUF file and its report appear together: whatever ends the process, neither misleads about the other."""

from pathlib import Path

import pytest

from llmcompress.store.output_file import OutputFile, beside


def write(path, text, stop=None):
    """A file and its report, both saying `text`. stop: fail at this rename, as if the process had been killed there."""
    with OutputFile(path, overwrite=True) as out:
        out.write_pieces(path.name, [b"GGUF", text.encode()])
        out.write_json("report.json", text)
        with pytest.MonkeyPatch.context() as patch:
            if stop is not None:
                patch.setattr(Path, "replace", failing(Path.replace, stop))
            out.commit()


def failing(replace, stop):
    left = [stop]

    def once(self, target):
        if left[0] == 0:
            raise OSError(5, "Input/output error")
        left[0] -= 1
        return replace(self, target)

    return once


@pytest.mark.parametrize("stop", [0, 1])
@pytest.mark.parametrize("replaces", [False, True])
def test_no_report_stands_beside_another_file(tmp_path, stop, replaces):
    path = tmp_path / "model.gguf"
    if replaces:
        write(path, "old")
    with pytest.raises(Exception, match="Input/output error"):
        write(path, "new", stop)
    report = beside(path, "report.json")
    if path.exists() and report.exists():
        assert path.read_bytes().decode()[4:] == report.read_text().strip().strip('"')
    assert path.exists() == replaces
    write(path, "again")
    assert path.read_bytes() == b"GGUFagain"
    assert report.read_text() == '"again"\n'
