"""Models stored as vendors ship them, made of ordinary ones: tests say what stands for each linear of a layer."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def linears(tensors):
    """The names of the matrices of layers."""
    return [name for name in tensors if ".layers." in name and tensors[name].dim() == 2 and "gate.weight" not in name]


def shipped(model, out, settings, parts):
    """A copy of a model at `out`, and the float64 values of its matrices by name.

    parts(name, weight): the tensors that stand for a matrix by their names behind the module's, and its values; or None
    for a matrix that stays as it is. settings: what config.json says of quantisation, or None for nothing.
    """
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    tensors, values = load_file(out / "model.safetensors"), {}
    for name in linears(tensors):
        if (found := parts(name, tensors[name].float())) is None:
            continue
        module = name.removesuffix(".weight")
        del tensors[name]
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in found[0].items()}
        values[name] = found[1]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    if settings is not None:
        config["quantization_config"] = settings
    (out / "config.json").write_text(json.dumps(config))
    return values


def changed(model, out, tensors=lambda tensors: None, **settings):
    """A copy of a shipped model whose tensors a function has changed in place, and whose settings differ."""
    shutil.copytree(model, out)
    held = load_file(out / "model.safetensors")
    tensors(held)
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {**config.get("quantization_config", {}), **settings}
    (out / "config.json").write_text(json.dumps(config))
    return out


def tile_scales(weight, rows, columns, most=448.0):
    """Scales [row tiles, column tiles] float32 that cover every tile of a matrix, and the same for each weight."""
    padded = torch.nn.functional.pad(weight.abs(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = tiles.amax(dim=(1, 3)) / most
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return scale, spread[: weight.shape[0], : weight.shape[1]]
