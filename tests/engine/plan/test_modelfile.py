"""Ollama's template is found by what the model's own renders, and says the same or nothing."""

import jinja2
import pytest

from llmcompress.engine.plan.modelfile import find_template, modelfile_text

SIMPLE = "{% for m in messages %}TURN{% endfor %}{% if add_generation_prompt %}PROMPT{% endif %}"


def of_turns(turn, prompt):
    return SIMPLE.replace("TURN", turn).replace("PROMPT", prompt)


CHATML = of_turns("{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'}}", "{{'<|im_start|>assistant\n'}}")
HEADERS = "<|start_header_id|>' + {} + '<|end_header_id|>\n\n"
LLAMA3 = of_turns(
    "{{'" + HEADERS.format("m.role") + "' + m.content + '<|eot_id|>'}}", "{{'" + HEADERS.format("'assistant'") + "'}}"
)
PHI3 = of_turns("{{'<|' + m.role + '|>\n' + m.content + '<|end|>\n'}}", "{{'<|assistant|>\n'}}")
GEMMA = of_turns(
    "{% if m.role == 'system' %}{{ fail() }}{% endif %}"
    "{{'<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + m.content + '<end_of_turn>\n'}}",
    "{{'<start_of_turn>model\n'}}",
)
SYSTEM = "{% if messages[0].role != 'system' %}{{'<|im_start|>system\nBe kind.<|im_end|>\n'}}{% endif %}"


def render(text):
    def fail():
        raise ValueError("no such role")

    template = jinja2.Environment().from_string(text)
    return lambda messages, prompt: template.render(messages=messages, add_generation_prompt=prompt, fail=fail)


@pytest.mark.parametrize("text", [CHATML, LLAMA3, PHI3, GEMMA, SYSTEM + CHATML])
def test_a_conversation_reads_the_same(text):
    found = find_template(render(text))
    assert found is not None
    talk = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "[A model]"},
        {"role": "user", "content": "<b>Which?</b>"},
        {"role": "assistant", "content": "none"},
        {"role": "user", "content": "user"},
    ]
    for messages in ([talk[0]], talk, [{"role": "system", "content": "Short."}, *talk][: len(talk) + (text != GEMMA)]):
        if text != GEMMA or messages[0]["role"] != "system":
            assert found.render(messages, True) == render(text)(messages, True)


def test_the_usual_system_text_is_kept():
    assert find_template(render(SYSTEM + CHATML)).default == "Be kind."
    assert find_template(render(CHATML)).default == ""
    assert find_template(render(GEMMA)).system is None


@pytest.mark.parametrize(
    "text",
    [
        "{{ fail() }}",
        "{{ messages | length }}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ loop.index }}<user>{{ m.content }}{% endfor %}",  # every turn is another
        of_turns("{{'{{' + m.role + '}}' + m.content}}", ""),  # would be code in Go
        of_turns('{{\'"""\' + m.role + m.content}}', ""),  # would end the text
    ],
)
def test_what_cannot_be_said_is_left_out(text):
    assert find_template(render(text)) is None


def test_modelfile_of_the_tiny_model(tiny_model_dir):
    text, notes = modelfile_text(tiny_model_dir, "tiny.gguf", add_bos=True)
    assert notes == []
    assert text.startswith('FROM ./tiny.gguf\nTEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>')
    assert '{{ .Prompt }}<|im_end|>\n<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"""' in text
    assert 'PARAMETER stop "<|im_end|>"\n' in text
    assert "PARAMETER temperature 0.7\nPARAMETER top_p 0.9\n" in text
