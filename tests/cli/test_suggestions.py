"""What users of other tools type is answered with what to write here, and with no name that only looks alike."""

import pytest

from llmcompress.cli.suggestions import COMMANDS, OPTIONS, VALUES


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_other_tools(main, capsys, command):
    assert main(command, "model/") == 2
    assert capsys.readouterr().err == f"error: no such command '{command}'\n  hint: {COMMANDS[command]}\n"


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_other_tools(main, capsys, option):
    assert main("gptq", "model/", option, "x") == 2
    assert capsys.readouterr().err == f"error: no such option: {option}\n  hint: {OPTIONS[option]}\n"


@pytest.mark.parametrize("option", VALUES)
def test_values_that_look_right(main, capsys, option):
    assert main("gptq", "model/", option, "4.5") == 2
    assert capsys.readouterr().err.endswith(f"  hint: {VALUES[option]}\n")


def test_a_name_that_is_misspelt_is_still_guessed(main, capsys):
    assert main("exprt", "model/") == 2
    assert "Did you mean 'export'" in capsys.readouterr().err
