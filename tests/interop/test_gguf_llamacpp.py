"""llama.cpp computes from our GGUF files what transformers computes from the weights we decode from them.

llama.cpp keeps keys and values in float16, looks gelu up in a table of float16, and multiplies quantised matrices with
inputs rounded to 8 bits, which now and then sends a token to another expert. So logits of F32 files agree to 1% of
their standard deviation for every token, those of Q8_0 to 20% for the median token.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from llamacpp import Llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ggufmodels import MODELS as BESIDE
from ggufmodels import small_config
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.recover.recover_plan import RecoverRequest, plan_recover
from llmcompress.engine.recover.recovery import recover
from llmcompress.errors import PlanError
from llmcompress.formats.gguf.family import known_types
from llmcompress.recipe import Calibration, parse
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.load import load_whole
from llmcompress.validate.session import Request, evaluate_paths
from madetokenizers import byte_level, save

pytestmark = pytest.mark.interop

ROWS = 288  # of the embedding: more than the 260 tokens
MODELS = [path for path in os.environ.get("LLMCOMPRESS_MODELS", "").split(os.pathsep) if path]  # real ones, if at hand
IDS = torch.randint(2, 260, (24,), generator=torch.Generator().manual_seed(0)).tolist()
TOLERANCE = {"F32": 0.01, "Q8_0": 0.2, "NVFP4": 0.1}
OVERRIDES = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6},  # the sixth has full attention
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma3n_text": {"hidden_size": 512, "intermediate_size": 2048},  # llama.cpp divides squares by one less than that
}
MODEL_TYPES = sorted(known_types())


def write(model, out, kind, *before, **step):
    """A GGUF file of `model`; before: steps ahead of the one that rounds."""
    steps = [*before, {"method": "rtn", "gguf": {"type": kind}, **step}]
    recipe = {"calibration": {"samples": 8, "length": 64}, "steps": steps, "output": {"format": "gguf"}}
    run(make_plan(parse(recipe), model, Options(out=out)))
    return out


def ours(file, model, ids):
    """Logits [tokens, vocabulary] of transformers on the weights decoded from a file."""
    with torch.no_grad():
        return load_whole(file, dtype=torch.float32, source=model)(torch.tensor([ids]), use_cache=False).logits[0]


def distances(mine, theirs):
    """Of each token the largest difference of logits, as a share of the standard deviation of all."""
    mine = np.asarray(mine)[:, : theirs.shape[1]]
    return np.abs(mine - theirs).max(axis=1) / mine.std()


@pytest.fixture(scope="module")
def model_of(random_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def make(kind, **config):
        small = {"model_type": kind, **small_config(kind, ROWS)} if kind in BESIDE else {}
        config = {**small, **OVERRIDES.get(kind, {}), "vocab_size": ROWS, **config}
        path = root / f"model-{len(list(root.iterdir()))}"  # some names change what llama.cpp does: phi-3
        shutil.copytree(random_model_dir(kind, dtype="float32", **config), path)
        return save(byte_level(), path)

    return make


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_family_gives_the_logits_of_transformers(kind, model_of, tmp_path):
    model = model_of(kind)
    turned = [IDS[0], *IDS[:0:-1]]
    for type_, summary in (("F32", np.max), ("Q8_0", np.median), ("NVFP4", np.median)):
        if type_ == "NVFP4" and not known_types()[kind].factored:
            with pytest.raises(PlanError, match="leaves out the factors"):
                write(model, tmp_path / f"{type_}.gguf", type_)
            continue
        file = write(model, tmp_path / f"{type_}.gguf", type_)
        mine = ours(file, model, IDS)
        with Llama(file, length=64) as llama:
            theirs = llama.logits(IDS)
            assert summary(distances(mine, theirs)) < TOLERANCE[type_]
            assert not [check for check in verify_gguf(file, model) if not check.ok]
            assert summary(distances(mine, llama.logits(turned))) > 1  # as it would be if llama.cpp computed otherwise
            assert llama.generate(IDS, 3)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = original(torch.tensor([IDS]), use_cache=False).logits[0]
    assert torch.allclose(logits, ours(tmp_path / "F32.gguf", model, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "few"),
    [
        ("deepseek_v32", {"index_topk": 8}),
        ("glm_moe_dsa", {"index_topk": 8}),
        ("minimax_m3_vl_text", {"index_topk_blocks": 3, "index_block_size": 4}),
        ("qwen4_exp_text", {"indexer_budget": 4}),
    ],
)
def test_llama_cpp_chooses_the_keys_that_an_index_chooses(kind, few, model_of, tmp_path):
    """Some of 24, by keys that llama.cpp keeps in float16: a token now and then chooses another one."""
    some, every = model_of(kind, **few), model_of(kind)
    file = write(some, tmp_path / "some.gguf", "F32")
    mine, whole = ours(file, some, IDS), ours(write(every, tmp_path / "every.gguf", "F32"), every, IDS)
    with Llama(file, length=64) as llama:
        theirs = llama.logits(IDS)
    assert np.median(distances(mine, theirs)) < TOLERANCE["F32"]
    assert np.median(distances(whole, theirs)) > 0.1


@pytest.mark.parametrize(
    ("method", "type_", "config"),
    [
        ("gptq", "Q8_0", {}),
        ("gptq", "Q4_0", {}),
        ("gptq", "Q4_K_M", {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "mamba_d_head": 32,
                            "mamba_d_ssm": 256}),
        ("rtn", "F16", {}),
        ("rtn", "F32", {"tie_word_embeddings": True}),
        ("rtn", "F32", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    ],
)  # fmt: skip
def test_multipliers_that_become_parts_of_matrices_are_those_of_the_model(method, type_, config, model_of, tmp_path):
    model = model_of("falcon_h1", **config)
    file = write(model, tmp_path / "model.gguf", type_, method=method)
    mine = ours(file, model, IDS)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = original(torch.tensor([IDS]), use_cache=False).logits[0]
    with Llama(file, length=64) as llama:
        theirs = llama.logits(IDS)
    assert not [check for check in verify_gguf(file, model) if not check.ok]
    assert np.median(distances(mine, theirs)) < (0.01 if type_.startswith("F") else 0.2)  # 8-bit inputs
    if type_ == "F32":
        assert torch.allclose(logits, mine, rtol=0, atol=1e-4)
    elif type_ != "F16":  # it is not the original that they agree with: 8-bit weights err like 8-bit inputs, 4-bit more
        further = 1.1 if type_ == "Q8_0" else 1.5
        assert np.median(distances(logits, theirs)) > further * np.median(distances(mine, theirs))


@pytest.mark.parametrize(
    ("method", "type_", "published"), [("rtn", "F32", True), ("rtn", "F32", False), ("gptq", "Q8_0", True)]
)
def test_layers_of_gemma_3n_take_keys_and_values_of_the_last_that_have_their_own(
    method, type_, published, model_of, tmp_path
):
    """25 layers, and tokens that the embeddings by layer lack; published weights have keys that no layer uses."""
    model = model_of("gemma3n_text", num_hidden_layers=25, num_kv_shared_layers=5, vocab_size_per_layer_input=200)
    stored = load_file(model / "model.safetensors")
    own = {name: value for name, value in stored.items() if name.startswith("model.layers.0.self_attn.")}
    for layer in range(20, 25) if published else ():
        more = {name.replace(".0.", f".{layer}."): value + 1 for name, value in own.items()}
        stored |= {name: value for name, value in more.items() if name not in stored}
    assert ("model.layers.20.self_attn.k_proj.weight" in stored) == published
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    plain = {"descent": 0, "qep_alpha": 0, "shrinkage": 0} if method == "gptq" else {}  # of 25 layers
    file = write(model, tmp_path / "model.gguf", type_, method=method, **plain)
    mine = ours(file, model, IDS)
    with Llama(file, length=64) as llama:
        theirs = llama.logits(IDS)
    assert any(token >= 200 for token in IDS)
    assert np.median(distances(mine, theirs)) < TOLERANCE[type_]
    assert not [check for check in verify_gguf(file, model) if not check.ok]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "mixtral"])
def test_a_rotated_model_gives_the_logits_of_the_original_in_llama_cpp(kind, model_of, tmp_path):
    model = model_of(kind)
    file = write(model, tmp_path / "rotated.gguf", "F32", {"method": "rotate"})
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = original(torch.tensor([IDS]), use_cache=False).logits[0]
    with Llama(file, length=64) as llama:
        assert distances(logits, llama.logits(IDS)).max() < TOLERANCE["F32"]


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_0"])
def test_a_model_of_scaled_channels_is_decoded_by_llama_cpp_as_by_us(type_, tiny_model_dir, tiny_eval_text, tmp_path):
    ids = AutoTokenizer.from_pretrained(tiny_model_dir)(tiny_eval_text.read_text()[:300])["input_ids"]
    file = write(tiny_model_dir, tmp_path / "scaled.gguf", type_, {"method": "awq", "steps": 8})
    mine = ours(file, tiny_model_dir, ids).log_softmax(-1)
    with Llama(file) as llama:
        theirs = torch.from_numpy(llama.logits(ids)).log_softmax(-1)
    assert divergence(mine, theirs) < 0.003


def test_a_recovered_file_is_decoded_by_llama_cpp_as_by_us(tiny_model_dir, tiny_eval_text, tmp_path):
    ids = AutoTokenizer.from_pretrained(tiny_model_dir)(tiny_eval_text.read_text()[:300])["input_ids"]
    before, file = write(tiny_model_dir, tmp_path / "before.gguf", "Q2_K"), tmp_path / "model.gguf"
    text = Calibration(samples=32, length=32)
    recover(plan_recover(before, tiny_model_dir, RecoverRequest(8), text, Options(out=file)))
    mine = ours(file, tiny_model_dir, ids).log_softmax(-1)
    with Llama(file) as llama:
        theirs = torch.from_numpy(llama.logits(ids)).log_softmax(-1)
    assert divergence(mine, theirs) < 0.003


def test_the_trained_model_says_the_same_in_llama_cpp(tiny_model_dir, tmp_path):
    text = "The water in the river"
    file = write(tiny_model_dir, tmp_path / "model.gguf", "F32")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    ids = tokenizer(text)["input_ids"]
    original = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        said = original.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)[0, len(ids) :].tolist()
        logits = original(torch.tensor([ids]), use_cache=False).logits[0]
    with Llama(file) as llama:
        assert llama.ids(text) == ids
        assert distances(logits, llama.logits(ids)).max() < TOLERANCE["F32"]
        assert llama.generate(ids, 24) == said
        assert llama.text(said, special=False) == tokenizer.decode(said, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        *(
            (kind, 0.003)
            for kind in (
                *("Q4_K_M", "Q2_K", "Q3_K_S", "IQ4_NL", "Q4_0", "Q4_1", "IQ4_XS", "MXFP4", "NVFP4", "Q5_0", "Q5_1"),
                *("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
            )
        ),  # 8-bit inputs
        ("BF16", 1e-4),  # inputs in bfloat16
        ("F16", 1e-6),
    ],
)
def test_llama_cpp_decodes_blocks_as_we_do(kind, bound, shallow_model_dir, tiny_eval_text, tmp_path):
    informed = {"method": "gptq"} if kind.startswith(("IQ1", "IQ2", "IQ3")) else {}
    file = write(shallow_model_dir, tmp_path / "model.gguf", kind, **informed)
    ids = AutoTokenizer.from_pretrained(shallow_model_dir)(tiny_eval_text.read_text()[:300])["input_ids"]
    mine = ours(file, shallow_model_dir, ids).log_softmax(-1)
    original = AutoModelForCausalLM.from_pretrained(shallow_model_dir, dtype=torch.float32)
    with torch.no_grad():
        source = original(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    with Llama(file) as llama:
        theirs = torch.from_numpy(llama.logits(ids)).log_softmax(-1)
    assert divergence(mine, theirs) < bound
    if bound == 0.003:
        assert divergence(source, theirs) > 4 * divergence(mine, theirs)  # it is not the original that they agree with


@pytest.mark.parametrize("model", [None, *MODELS], ids=lambda path: "tiny" if path is None else Path(path).name)
@pytest.mark.parametrize(("kind", "bound"), [("F16", 0.005), ("Q4_K_M", 0.01)])
def test_perplexity_is_that_of_llama_cpp(kind, bound, model, tiny_model_dir, tiny_eval_text, tmp_path):
    """On the same windows, every token but the first scored; inputs of 8 bits take more than those of 16."""
    path, length, windows = (Path(model), 512, 8) if model else (tiny_model_dir, 256, 8)
    text = Path(os.environ.get("LLMCOMPRESS_TEXT") or tiny_eval_text) if model else tiny_eval_text
    file = write(path, tmp_path / "model.gguf", kind)
    mine = evaluate_paths(Request(file, path, str(text), length, windows, 2, "cpu", "float32"), lambda done, of: None)
    ids = AutoTokenizer.from_pretrained(path)(text.read_text(), verbose=False)["input_ids"]
    lost = []
    with Llama(file, length=length) as llama:
        for start in range(0, windows * length, length):
            window = ids[start : start + length]
            logs = torch.from_numpy(llama.logits(window)[:-1]).log_softmax(-1)
            lost.append(-logs[torch.arange(length - 1), window[1:]].mean())
        said = llama.generate(ids[:16], 8)
    assert said
    assert mine["perplexity"] == pytest.approx(float(torch.stack(lost).mean().exp()), rel=bound)


@pytest.mark.parametrize(("options", "kind"), [({}, "Q4_0"), ({"sym": False}, "Q4_1"), ({"group_size": 128}, "Q4_0")])
def test_llama_cpp_reads_the_codes_of_a_quantised_checkpoint(options, kind, tiny_model_dir, tiny_eval_text, tmp_path):
    step = {"method": "rtn", "bits": 4, "group_size": 32, **options}
    source = tmp_path / "source"
    recipe = {"steps": [step], "output": {"format": "gptq"}}
    run(make_plan(parse(recipe), tiny_model_dir, Options(out=source)))
    file = write(source, tmp_path / "model.gguf", kind)
    again = write(file, tmp_path / "again.gguf", kind)  # from a GGUF file, all of it copied
    ids = AutoTokenizer.from_pretrained(tiny_model_dir)(tiny_eval_text.read_text()[:300])["input_ids"]
    mine = ours(file, source, ids).log_softmax(-1)
    with torch.no_grad():
        coded = load_whole(source, dtype=torch.float32)(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        original = load_whole(tiny_model_dir, dtype=torch.float32)(torch.tensor([ids]), use_cache=False).logits[0]
    with Llama(file) as llama, Llama(again) as other:
        theirs = torch.from_numpy(llama.logits(ids))
        assert torch.equal(theirs, torch.from_numpy(other.logits(ids)))
    theirs = theirs.log_softmax(-1)
    assert divergence(mine, theirs) < 0.003  # 8-bit inputs
    assert divergence(original.log_softmax(-1), theirs) > 4 * divergence(coded, theirs)


def divergence(p, q):
    """Mean KL divergence of next tokens, from log-probabilities [tokens, vocabulary]."""
    return float((p.exp() * (p - q)).sum(-1).mean())
