"""Build ONNX models of checkpoints by onnxruntime-genai's model builder and save the logits that its runtime gives.

    .venv-onnxruntime_genai/bin/python onnxruntime_genai_check.py IDS FOUND CHECKPOINT ...

IDS has `input_ids` [windows, length]. FOUND gets a float32 tensor [windows, length, vocabulary] under each checkpoint's
name as given; the last line printed is a JSON object with the error of those that it does not build or run.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

# inputs of products stay in float32, and embedding and head, which no checkpoint here has codes of, as they are
AS_STORED = ["accuracy_level=1", "nodes_to_exclude=/lm_head/MatMul", "shared_embeddings=false"]


def main() -> None:
    given, found, *checkpoints = sys.argv[1:]

    from safetensors.torch import load_file, save_file

    ids = load_file(given)["input_ids"]
    logits, errors = {}, {}
    for checkpoint in checkpoints:
        try:
            with contextlib.redirect_stdout(sys.stderr), TemporaryDirectory(dir=".") as out:
                logits[checkpoint] = of_model(build(checkpoint, out), ids)
        except Exception as error:  # whatever another project raises is the finding
            errors[checkpoint] = f"{type(error).__name__}: {error}"
    save_file(logits, found)
    print(json.dumps(errors))


def build(checkpoint: str, out: str) -> str:
    """The ONNX model of a checkpoint, in the folder `out`."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    coded = "quantization_config" in json.loads((Path(checkpoint) / "config.json").read_text())
    asked = "", checkpoint, out, "int4" if coded else "fp32", "cpu", f"{out}/cache"
    create_model(*asked, **parse_extra_options(*asked, AS_STORED if coded else []))
    return out


def of_model(path: str, ids: Any) -> Any:
    import onnxruntime_genai
    import torch

    model = onnxruntime_genai.Model(path)
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(batch_size=len(ids), max_length=ids.shape[1] + 1)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(ids.to(torch.int32).numpy())
    return torch.from_numpy(generator.get_output("logits").copy()).float()


if __name__ == "__main__":
    main()
