"""Train the tiny language model of the tests, on the text in calib_data/ that was written for this project.

    python scripts/make_tiny_model.py            # writes tests/models/tiny-llama and tests/models/tiny-llama-eval.txt

A Llama of 2.7 million parameters with a byte-level BPE of 1,200 tokens, trained on 2.5 million tokens (17 times the
text; 17 minutes on two shared cores). The last 7 % of every document are held out: they are the second file, and enter
neither the tokenizer nor the training. (calib_data/ holds them too, so a test that compares calibrated methods on the
held-out text should calibrate on something else, or accept it.) The same seed and number of threads give the same model
on one machine.

Rounding to nearest (symmetric, groups of 64), measured on the held-out text, 20 windows of 512 tokens, in float32:

    bits                    16      8        4        3        2
    perplexity, minmax    79.54  79.56    83.70   102.55   361.32
    mean KL, minmax           0  0.0002   0.081    0.366    1.861
    perplexity, search    79.54  79.55    82.38    90.27   122.50
    mean KL, search           0  0.0002   0.057    0.193    0.609
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = 0.07  # share of each document, at its end
ENGLISH = ("prose", "dialogue", "qa", "essays")
WEIGHT_OF_ENGLISH = 2  # windows start this much more often in an English document
VOCABULARY = 1200
LENGTH = 512
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LICENSE = """\
This model, its tokenizer and the text it was trained on were made for llmcompress by scripts/make_tiny_model.py.
They are dedicated to the public domain under CC0 1.0 Universal (https://creativecommons.org/publicdomain/zero/1.0/).
"""


def split(text: str) -> tuple[str, str]:
    """The document without its end, and its end, cut at white space."""
    at = int(len(text) * (1 - HELD_OUT))
    while at < len(text) and not text[at - 1].isspace():
        at += 1
    return text[:at], text[at:].strip() + "\n"


def documents(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(kind, training text, held-out text) of every document, in sorted order."""
    for file in sorted(folder.rglob("*.txt"), key=lambda file: file.relative_to(folder).parts):
        yield file.relative_to(folder).parts[0], *split(file.read_text(encoding="utf-8"))


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text round-trips; <s> is put before every text, as Llama's tokenizers do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a text of any length, <s> first."""
    return list(tokenizer.backend_tokenizer.encode(text).ids)


def windows(ids: list[int], length: int) -> Tensor:
    """Non-overlapping windows [count, length]; the rest is dropped."""
    count = len(ids) // length
    return torch.tensor(ids[: count * length]).view(count, length)


@torch.no_grad()
def loss_on(model: LlamaForCausalLM, data: Tensor) -> float:
    """Mean cross-entropy in nats, windows [count, length], all positions but the first scored."""
    model.eval()
    total = 0.0
    for batch in data.split(4):
        logits = model(input_ids=batch).logits[:, :-1].float()
        total += float(cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1), reduction="sum"))
    model.train()
    return total / (data.shape[0] * (data.shape[1] - 1))


def train(
    model: LlamaForCausalLM, stream: Tensor, starts: Tensor, held_out: Tensor, *, steps: int, batch: int, rate: float
) -> None:
    """AdamW with a cosine schedule on random windows of the stream [tokens]; bf16 products, float32 weights."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=rate, betas=(0.9, 0.95)
    )
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: min((step + 1) / warmup, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))),
    )
    began = time.monotonic()
    for step in range(steps):
        at = starts[torch.randint(len(starts), (batch,))]
        ids = stream[at[:, None] + torch.arange(LENGTH + 1)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids[:, :-1]).logits
        loss = cross_entropy(logits.float().reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.monotonic() - began
            now = f"train {float(loss.detach()):.3f}  held out {loss_on(model, held_out):.3f}"
            print(f"step {step + 1}/{steps}  {now}  {seconds:.0f} s", flush=True)


@torch.no_grad()
def grow_outliers(model: LlamaForCausalLM, sigma: float, seed: int) -> None:
    """Rescale channels between neighbours, which leaves the function as it is, by log-normal factors of width sigma.

    Large models grow channels of very different sizes; they are what makes plain rounding hurt, and what smoothing and
    activation-aware scaling undo. One this small and young does not: without this its KL at 2 bits is a fifth.
    """
    generator = torch.Generator().manual_seed(seed)

    def factors(count: int) -> Tensor:
        return torch.exp(sigma * torch.randn(count, generator=generator))

    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            factor = factors(norm.weight.numel())
            norm.weight /= factor
            for reader in readers:
                reader.weight *= factor
        factor = factors(attention.v_proj.out_features)
        attention.v_proj.weight /= factor[:, None]
        attention.o_proj.weight *= factor.view(-1, model.config.head_dim).repeat_interleave(groups, 0).reshape(-1)
        factor = factors(mlp.up_proj.out_features)
        mlp.up_proj.weight /= factor[:, None]
        mlp.down_proj.weight *= factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, default=ROOT / "calib_data", help="folder of .txt documents")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "models" / "tiny-llama")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=4, help="windows of 512 tokens per step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--outliers", type=float, default=0.6, help="width of the spread between channels")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    found = list(documents(options.text))
    tokenizer = train_tokenizer([text for kind, text, _ in found for _ in range(1 + (kind in ENGLISH))])
    eval_text = "\n".join(held for _, _, held in found)
    held_out = windows(encode(tokenizer, eval_text), LENGTH)

    stream: list[int] = []
    starts: list[int] = []
    for kind, text, _ in found:
        ids = [*encode(tokenizer, text), tokenizer.eos_token_id]
        starts += list(range(len(stream), len(stream) + len(ids))) * (WEIGHT_OF_ENGLISH if kind in ENGLISH else 1)
        stream += ids
    stream += stream[: LENGTH + 1]  # windows that start in the last document run on into the first
    print(f"{len(found)} documents, {len(stream)} training tokens, {held_out.numel()} held-out tokens", flush=True)

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    train(
        model,
        torch.tensor(stream),
        torch.tensor(starts),
        held_out,
        steps=options.steps,
        batch=options.batch,
        rate=options.rate,
    )
    grow_outliers(model, options.outliers, options.seed)
    model.to(torch.bfloat16)
    print(f"held-out perplexity {math.exp(loss_on(model.float(), held_out)):.2f}")

    shutil.rmtree(options.out, ignore_errors=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    # transformers 4, which other projects' readers bring, knows neither of the names that transformers 5 writes here
    settings = options.out / "tokenizer_config.json"
    known = json.loads(settings.read_text(encoding="utf-8"))
    known["tokenizer_class"] = "PreTrainedTokenizerFast"
    known["additional_special_tokens"] = known.pop("extra_special_tokens")
    settings.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (options.out / "LICENSE").write_text(LICENSE, encoding="utf-8")
    options.out.with_name(f"{options.out.name}-eval.txt").write_text(eval_text, encoding="utf-8")


if __name__ == "__main__":
    main()
