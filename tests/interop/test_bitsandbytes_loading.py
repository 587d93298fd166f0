"""transformers with bitsandbytes reads what we write, and decodes it to the values that we do."""

import pytest
import torch

pytestmark = pytest.mark.interop
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
FOUR = {
    "rtn": {"type": "nf4"},
    "plain": {"type": "nf4", "double_quant": False, "clip": "minmax"},
    "gptq": {"type": "nf4", "method": "gptq"},
    "skipped": {"type": "nf4", "set": {"layers.1.mlp.*": {"skip": True}}},
}
EIGHT = {
    "rtn": {"type": "int8", "bits": 8},
    "gptq": {"type": "int8", "bits": 8, "method": "gptq"},
    "skipped": {"type": "int8", "bits": 8, "set": {"self_attn.o_proj": {"skip": True}}},
}


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, device_map="cpu").eval()


def linears(model):
    return {name: module for name, module in model.named_modules() if hasattr(module, "weight") and ".layers." in name}


def near(ours, theirs, share):
    assert ours.std() > 0.1  # the models do depend on their input
    return float((ours - theirs).abs().mean()) <= share * float(ours.std())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", FOUR)
def test_nf4_decodes_in_bitsandbytes_to_the_same_bits(compress, family, dtype, name):
    options = FOUR[name]
    loaded = load(compress(family, dtype, "bitsandbytes", **options))
    dense = dict(load(compress(family, dtype, "dense", **options)).named_parameters())
    found = 0
    for path, module in linears(loaded).items():
        if isinstance(module, bnb.nn.Linear4bit):
            value = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(value, dense[f"{path}.weight"]), path
            found += 1
    assert found == (11 if name == "skipped" else 14)
    assert not isinstance(loaded.lm_head, bnb.nn.Linear4bit)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_nf4_gives_the_logits_of_our_reader(compress, family):
    from llmcompress.validate.load import load_whole

    path = compress(family, "bfloat16", "bitsandbytes", type="nf4")
    with torch.no_grad():
        ours = load_whole(path, dtype=torch.float32)(IDS).logits
        theirs = load(path)(IDS).logits.float()
    assert near(ours, theirs, 0.03)  # kernels of bfloat16 with scales in bfloat16


@pytest.mark.parametrize("name", EIGHT)
def test_int8_decodes_in_bitsandbytes_to_the_same_bits(compress, name):
    options = EIGHT[name]
    path = compress("llama", "float16", "bitsandbytes", **options)
    from llmcompress.engine.source.open import directory_headers, open_checkpoint
    from llmcompress.ledger import Ledger

    ours = open_checkpoint(directory_headers(path, Ledger()))
    found = 0
    for place, module in linears(load(path)).items():
        if isinstance(module, bnb.nn.Linear8bitLt):
            scale = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            value = bnb.functional.int8_vectorwise_dequant(module.weight.data, scale)
            assert torch.equal(value.float(), ours.read(f"{place}.weight")), place
            assert module.state.threshold == 6.0
            found += 1
    assert found == (12 if name == "skipped" else 14)


def test_int8_gives_the_logits_of_our_reader(compress):
    from llmcompress.validate.load import load_whole

    path = compress("llama", "float16", "bitsandbytes", type="int8", bits=8)
    with torch.no_grad():
        ours = load_whole(path, dtype=torch.float32)(IDS).logits
        theirs = load(path)(IDS).logits.float()
    assert near(ours, theirs, 0.05)  # a value at the border of two steps falls either way, and every layer rounds


def test_inputs_are_rounded_as_the_int8_product_of_bitsandbytes_rounds_them():
    from llmcompress.grids.int8 import fit
    from llmcompress.grids.int8_inputs import ByThreshold

    g = torch.Generator().manual_seed(8)
    weight, x = torch.randn(32, 96, generator=g) * 0.1, torch.randn(20, 96, generator=g).half()
    x[:, 5] *= 12
    weight[:, 5] *= 0.1  # so that rounding the result to float16 hides nothing
    grid = fit(weight, clip="minmax")
    codes = grid.encode(weight)
    state = bnb.MatmulLtState()
    state.CB, state.SCB = (codes.to(torch.int16) - 128).to(torch.int8), grid.absmax[:, 0]
    state.has_fp16_weights = state.is_training = False  # while training, a processor rounds no inputs
    theirs = bnb.matmul(x.clone(), state.CB, state=state, threshold=6.0).float()
    ours = ByThreshold(6.0).rounded(x.float()) @ grid.decode(codes).T
    unrounded = x.float() @ grid.decode(codes).T
    assert (theirs - ours).abs().mean() < 0.3 * (theirs - unrounded).abs().mean()


@pytest.mark.parametrize("double", [True, False])
def test_what_bitsandbytes_quantises_is_what_rounding_gives_here(double):
    from llmcompress.grids.nf4 import Nf4Spec, fit

    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(3)) * 0.02
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=double, quant_type="nf4", quant_storage=torch.uint8
    )
    grid = fit(weight, Nf4Spec(double), clip="minmax")
    if double:
        assert torch.equal(grid.code.reshape(-1), state.absmax)
        assert torch.equal(grid.nested.reshape(-1)[::256], state.state2.absmax)
        assert float(grid.common[0]) == float(state.offset)
    else:
        codes = grid.encode(weight).reshape(-1, 2)
        assert torch.equal(((codes[:, :1] << 4) | codes[:, 1:]), packed)
        assert torch.equal(grid.decode(grid.encode(weight)), bnb.functional.dequantize_4bit(packed, state))


def test_the_dynamic_map_is_that_of_bitsandbytes():
    from llmcompress.grids.nf4 import LEVELS, dynamic_map

    assert torch.equal(dynamic_map(), bnb.functional.create_dynamic_map())
    assert torch.equal(torch.tensor(LEVELS), bnb.functional.get_4bit_type("nf4", device="cpu"))


def test_rows_of_int8_are_those_of_bitsandbytes():
    from llmcompress.grids.int8 import fit

    weight = (torch.randn(24, 96, generator=torch.Generator().manual_seed(5)) * 0.1).half()
    codes, scale, _ = bnb.functional.int8_vectorwise_quant(weight)
    grid = fit(weight.float(), clip="minmax")
    assert torch.equal(grid.absmax[:, 0], scale)
    assert torch.equal(grid.encode(weight.float()).to(torch.int16) - 128, codes.to(torch.int16))


def test_a_checkpoint_that_transformers_saved_is_read(random_model_dir, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from llmcompress.validate.load import load_whole

    source = random_model_dir("llama", dtype="bfloat16", hidden_size=128, intermediate_size=256)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu").eval()
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        ours = load_whole(tmp_path / "saved", dtype=torch.float32)(IDS).logits
        theirs = model(IDS).logits.float()
    assert near(ours, theirs, 0.03)
