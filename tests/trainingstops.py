"""Stops between the steps of commands that train."""


def goes_on_to_the_same_bytes(command, main, capsys, tmp_path):
    """A command of five steps that writes `out`: stopped after every step, it ends with the bytes of one run."""
    assert main(*command) == 0
    done = (tmp_path / "out").rename(tmp_path / "whole")
    capsys.readouterr()
    for step in range(1, 5):
        assert main(*command, "--deadline", 0) == 75
        message = capsys.readouterr().err
        assert f"error: stopped at a safe point, {step} of 5 steps done" in message
        assert "the same command goes on from here" in message
        assert {path.name for path in tmp_path.iterdir()} == {"whole", "out.work"}
    assert main(*command, "--deadline", 0) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}
    names = {file.name for file in done.iterdir()}
    assert names == {file.name for file in (tmp_path / "out").iterdir()}
    assert all((done / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in names)
