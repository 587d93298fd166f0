"""`eval --long` against whole models that transformers runs in float64, by position, needle and prompt."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmcompress
from llmcompress.errors import CalibrationError, GateError, RecipeError
from llmcompress.report.schemas import schema_text
from llmcompress.validate import evaluate as lockstep_module
from llmcompress.validate import long_text as module
from llmcompress.validate.long_text import ALONE, COMPARED, bands
from llmcompress.validate.needles import DEPTHS, haystack, plant
from llmcompress.validate.repetition import ends_in_loop, repetition

SHORT = {"length": 256, "windows": 3, "items": 1, "batch": 8, "device": "cpu"}
PROMPTS, WRITTEN = 3, 48


@pytest.fixture(autouse=True, scope="module")
def _little_is_written():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PROMPTS", PROMPTS)
        patch.setattr(module, "_WRITTEN", WRITTEN)
        yield


@pytest.fixture(scope="module")
def damaged(shallow_model_dir, tmp_path_factory):
    """The model with every matrix of its layers rounded to four values per row."""
    folder = shutil.copytree(shallow_model_dir, tmp_path_factory.mktemp("damaged") / "damaged")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "layers." in name and tensor.ndim == 2:
            value = tensor.float()
            low, high = value.amin(1, keepdim=True), value.amax(1, keepdim=True)
            step = (high - low) / 3
            tensors[name] = (((value - low) / step).round() * step + low).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(damaged, shallow_model_dir, tiny_eval_text):
    return llmcompress.evaluate_long(damaged, shallow_model_dir, text=tiny_eval_text, **SHORT)


@pytest.fixture(scope="module")
def whole(damaged, shallow_model_dir):
    """Log-probabilities float64 [rows, length, vocabulary] of both models: whole, and of all tokens at once."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (damaged, shallow_model_dir)]

    @torch.no_grad()
    def of(ids):
        return [model(torch.as_tensor(ids)).logits.log_softmax(-1) for model in models]

    return of


@pytest.fixture(scope="module")
def tokens(shallow_model_dir, tiny_eval_text):
    """The tokenizer, and the ids of the text."""
    tokenizer = AutoTokenizer.from_pretrained(shallow_model_dir)
    return tokenizer, tokenizer(tiny_eval_text.read_text())["input_ids"]


def test_bands_hold_every_scored_position_once():
    assert list(bands(2048)) == [(1, 127), (128, 255), (256, 511), (512, 1023), (1024, 2047)]
    assert list(bands(300)) == [(1, 127), (128, 255), (256, 299)]
    for length in (2, 100, 128, 129, 256, 257, 5000):
        assert [at for first, last in bands(length) for at in range(first, last + 1)] == list(range(1, length))


def test_divergence_by_position_is_that_of_whole_models(found, whole, tokens):
    ids = torch.tensor(tokens[1][: 3 * 256]).view(3, 256)
    ours, original = whole(ids)
    kl = (original.exp() * (original - ours)).sum(-1)[:, :-1].numpy()  # after 1, 2, ... 255 tokens
    nll, ref_nll = (-logs[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy() for logs in (ours, original))
    assert [(band["first"], band["last"]) for band in found.bands] == [(1, 127), (128, 255)]
    for band, part in zip(found.bands, (slice(0, 127), slice(127, 255)), strict=True):
        assert band["kl"] == pytest.approx(kl[:, part].mean(), rel=1e-4)
        assert band["perplexity"] == pytest.approx(np.exp(nll[:, part].mean()), rel=1e-4)
        assert band["ref_perplexity"] == pytest.approx(np.exp(ref_nll[:, part].mean()), rel=1e-4)
        assert band["kl_max"] == pytest.approx(kl[:, part].max(), rel=1e-3)
        assert band["tokens"] == kl[:, part].size
        low, high = band["kl_ci"]
        means = kl[:, part].mean(1)
        assert min(means) * 0.999 < low < band["kl"] < high < max(means) * 1.001
    assert found.figures["kl"] == pytest.approx(kl.mean(), rel=1e-4)
    growth = kl[:, 127:].mean() - kl[:, :127].mean()
    assert found.figures["kl_growth"] == pytest.approx(growth, abs=1e-4)
    low, high = found.figures["kl_growth_ci"]
    assert low <= growth <= high


def test_needles_are_scored_as_whole_models_score_them(found, whole, tokens):
    tokenizer, ids = tokens
    for needle in plant(tokenizer, haystack(tokenizer, ids), 256, 1):
        figures = found.document["needles"]["by_depth"][f"{needle.depth:.0%}"]
        assert figures["items"] == 1
        both = whole([one.ids for one in needle.asked])  # of one length, as all words have as many tokens
        wanted = torch.tensor([one.ids[one.start :] for one in needle.asked])
        for logs, prefix in zip(both, ("", "ref_"), strict=True):
            said = logs[:, needle.asked[0].start - 1 : -1]
            totals = said.gather(2, wanted[..., None]).sum((1, 2))
            assert figures[f"{prefix}loglikelihood"] == pytest.approx(float(totals[needle.answer]), rel=1e-4)
            assert figures[f"{prefix}acc"] == float(totals.argmax() == needle.answer)
            assert figures[f"{prefix}exact"] == float((said.argmax(-1) == wanted)[needle.answer].all())
    parts = [found.document["needles"]["by_depth"][f"{depth:.0%}"] for depth in DEPTHS]
    assert found.figures["needle_items"] == len(parts) == 5
    assert found.figures["ref_needle_acc"] == pytest.approx(np.mean([part["ref_acc"] for part in parts]))
    assert set(found.document["needles"]["by_length"]) == {"256"}


def test_what_is_written_is_what_whole_models_find_likeliest(found, whole, tokens):
    tokenizer, ids = tokens
    text = haystack(tokenizer, ids)
    rates, loops = ([[], []] for _ in "12")
    for number in range(PROMPTS):
        begin = next(at for at in text.begins if at >= number / PROMPTS * len(text.ids))
        prompt = [tokenizer.bos_token_id, *text.ids[begin : begin + 32]]
        for turn in range(2):
            read = list(prompt)
            while len(read) < len(prompt) + WRITTEN and tokenizer.eos_token_id not in read:
                read.append(int(whole([read])[turn][0, -1].argmax()))
            written = read[len(prompt) :]
            written = written[:-1] if written[-1] == tokenizer.eos_token_id else written
            rates[turn].append(repetition(written))
            loops[turn].append(ends_in_loop(written))
    for turn, prefix in enumerate(("", "ref_")):
        assert found.figures[f"{prefix}repetition"] == pytest.approx(np.mean(rates[turn]), rel=1e-5)
        assert found.figures[f"{prefix}looping"] == pytest.approx(np.mean(loops[turn]), rel=1e-5)
    assert found.figures["prompts"] == PROMPTS


def test_a_damaged_model_is_worse_and_an_equal_one_is_equal(found, shallow_model_dir, tiny_eval_text):
    assert found.figures["kl"] > 0.1
    assert found.figures["perplexity_ratio"] > 1.05
    assert found.figures["needle_loglikelihood_drop"] != 0
    same = llmcompress.evaluate_long(shallow_model_dir, shallow_model_dir, text=tiny_eval_text, **SHORT).figures
    for name in ("kl", "kl_max", "kl_growth", "needle_acc_drop", "needle_exact_drop", "needle_loglikelihood_drop",
                 "repetition_rise", "looping_rise"):  # fmt: skip
        assert same[name] == 0, name
    assert same["top1"] == same["needle_same_answer"] == same["needle_acc_p"] == same["perplexity_ratio"] == 1
    for name in ("perplexity", "needle_loglikelihood", "repetition", "written_tokens"):
        assert same[f"ref_{name}"] == same[name] == found.figures[f"ref_{name}"]


def test_logits_of_some_tokens_at_a_time_are_those_of_all(
    found, damaged, shallow_model_dir, tiny_eval_text, monkeypatch
):
    monkeypatch.setattr(lockstep_module, "_PIECE", 37)
    again = llmcompress.evaluate_long(damaged, shallow_model_dir, text=tiny_eval_text, **SHORT | {"batch": 1})
    for name, value in found.figures.items():
        if name != "kv_cache":
            assert again.figures[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_the_command_saves_what_python_finds(main, capsys, found, damaged, shallow_model_dir, tiny_eval_text, tmp_path):
    file = tmp_path / "long.json"
    given = ["eval", damaged, "--ref", shallow_model_dir, "--long", "--text", tiny_eval_text, "--length", 256]
    given += ["--windows", 3, "--items", 1, "--batch", 8, "-o", file]
    assert main(*given, "--json", "--fail-if", "kl > 100", "--fail-if", "needle_exact_drop > 1") == 0
    printed, saved = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    Draft202012Validator(json.loads(schema_text("long"))).validate(saved)
    assert saved == found.document
    assert printed == saved
    named = {name for name in found.figures if not name.endswith("_ci")}
    assert named - {"kv_cache"} == {*ALONE, *COMPARED}
    assert main(*given) == 2
    assert "exists" in capsys.readouterr().err
    assert main(*given, "--overwrite", "--fail-if", "kl > 0", "-q") == 3
    shown = capsys.readouterr()
    assert "kl is " in shown.err
    assert "3 windows of 256 tokens of the 512 that the model reads" in " ".join(shown.out.split())
    for band in found.bands:
        [row] = [line for line in shown.out.splitlines() if line.startswith(f"{band['first']} to {band['last']} ")]
        assert f"{band['kl']:.4g}" in row
    assert re.search(r"at 50% of the text +1 ", shown.out)
    assert re.search(rf"sequences of 4 tokens that came before +{found.figures['repetition']:.1%}", shown.out)


def test_a_model_alone_has_figures_without_comparison(shallow_model_dir, tiny_eval_text, tmp_path):
    one = {**SHORT, "windows": 1}
    alone = llmcompress.evaluate_long(shallow_model_dir, text=tiny_eval_text, **one)
    Draft202012Validator(json.loads(schema_text("long"))).validate(alone.document)
    assert {name for name in alone.figures if not name.endswith("_ci")} - {"kv_cache"} == set(ALONE)
    assert "perplexity_ci" not in alone.figures  # one window says nothing of others
    with pytest.raises(GateError, match="windows is 1"):
        alone.fail_if("windows > 0")
    with pytest.raises(RecipeError, match="needs the original"):
        alone.fail_if("needle_acc_drop > 0")


def test_figures_that_are_not_finite_pass_no_gate(main, capsys, shallow_model_dir, tiny_eval_text, tmp_path):
    folder = shutil.copytree(shallow_model_dir, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    given = ["eval", folder, "--ref", shallow_model_dir, "--long", "--text", tiny_eval_text, "--length", 256]
    given += ["--windows", 2, "--items", 1, "-q", "-o", tmp_path / "long.json"]
    assert main(*given, "--fail-if", "needle_exact_drop < -1") == 3
    assert "figures of the model are not finite" in capsys.readouterr().err
    assert not (tmp_path / "long.json").exists()


def test_the_length_is_as_much_as_the_model_and_the_text_have(shallow_model_dir, tiny_eval_text, tokens, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(tiny_eval_text.read_text()[:900])
    count = len(tokens[0](short.read_text())["input_ids"])
    for text, length, windows in ((short, count, 1), (tiny_eval_text, 512, 2)):
        found = llmcompress.evaluate_long(shallow_model_dir, text=text, windows=windows, items=1, batch=8).document
        assert (found["text"]["length"], found["text"]["windows"], found["context"]) == (length, windows, 512)
        assert found["bands"][-1]["last"] == length - 1
        assert int(max(found["needles"]["by_length"], key=int)) == length


def refused(model, text, **options):
    with pytest.raises(CalibrationError) as error:
        llmcompress.evaluate_long(model, text=text, **options)
    return f"{error.value.message} / {error.value.hint}"


def test_what_cannot_be_measured_is_refused_before_a_weight_is_read(
    shallow_model_dir, tiny_eval_text, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "score", lambda *_: pytest.fail("read a model"))
    assert "longer than the model's 512 positions / use --length 512" in refused(
        shallow_model_dir, tiny_eval_text, length=513
    )
    short = tmp_path / "short.txt"
    short.write_text(tiny_eval_text.read_text()[:700])
    assert re.search(r"has \d{3} tokens, a window 500 / give more text", refused(shallow_model_dir, short, length=500))
    short.write_text("A text of six words, no more.")
    assert "too many for text of " in refused(shallow_model_dir, short)
    assert "windows of 512 tokens, 99 were asked for" in refused(shallow_model_dir, tiny_eval_text, windows=99)
    for items in (0, 101):
        with pytest.raises(RecipeError, match=f"1 to 100 --items, not {items}"):
            llmcompress.evaluate_long(shallow_model_dir, items=items)
    monkeypatch.setattr(module, "_WRITTEN", 480)
    assert "480 tokens written after 33, the model reads 512" in refused(shallow_model_dir, tiny_eval_text)


def test_a_window_of_attention_that_slides_is_run_as_transformers_runs_it(
    shallow_model_dir, damaged, tokens, tiny_eval_text, tmp_path
):
    """The same weights as a Mistral whose tokens see 40 others: positions beyond are those that differ."""
    folders = []
    for source in (damaged, shallow_model_dir):
        folder = shutil.copytree(source, tmp_path / source.name)
        config = json.loads((folder / "config.json").read_text())
        sliding = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40}
        (folder / "config.json").write_text(json.dumps(config | sliding))
        folders.append(folder)
    found = llmcompress.evaluate_long(*folders, text=tiny_eval_text, **SHORT | {"windows": 1})
    ids = torch.tensor(tokens[1][:256])[None]
    with torch.no_grad():
        ours, original = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)(ids).logits[0].log_softmax(-1)
            for path in folders
        )
    kl = (original.exp() * (original - ours)).sum(-1)[:-1]
    assert [band["kl"] for band in found.bands] == pytest.approx(
        [float(kl[:127].mean()), float(kl[127:].mean())], rel=1e-4
    )


def test_a_gguf_file_is_measured_with_the_cache_that_is_asked_for(main, shallow_model_dir, tiny_eval_text, tmp_path):
    file = tmp_path / "model.gguf"
    assert main("gguf", shallow_model_dir, "--type", "Q4_0", "-o", file, "-q") == 0
    found = llmcompress.evaluate_long(file, shallow_model_dir, text=tiny_eval_text, kv_bits=8, **SHORT)
    assert 0 < found.figures["kl"] < 1
    assert found.figures["kv_cache"] == "int8 per token and head"
    again = llmcompress.evaluate(file, shallow_model_dir, text=tiny_eval_text, kv_bits=8, length=256, windows=3)
    assert found.figures["kl"] == pytest.approx(again.kl, rel=1e-4)
    assert found.document["text"] == again.document["text"]
