"""Write a diffusers model folder as one file in the original layout of Stable Diffusion 2 or XL.

User interfaces and ``from_single_file`` of diffusers read it. The names are those of the reference
code, CompVis/latent-diffusion and OpenCLIP, as diffusers' single-file loader maps them
(loaders/single_file_utils.py, diffusers 0.42.1, read 2026-11).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
from sm_train.entrypoints.models.weight_files import (
    TensorSpec,
    read_layout,
    read_tensors,
    write_tensors,
)
from torch import Tensor

SINGLE_FILE_CLASSES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
"""Pipelines whose original layout is known here."""

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_LAYERS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    # Names in files from before diffusers 0.18.
    "query": "q",
    "key": "k",
    "value": "v",
    "proj_attn": "proj_out",
}
_OPEN_CLIP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
_OPEN_CLIP_LAYERS = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_QKV = ("q_proj", "k_proj", "v_proj")
_QKV_NAME = re.compile(r"encoder\.layers\.(\d+)\.self_attn\.(q|k|v)_proj\.(weight|bias)")


@dataclass(frozen=True)
class _Target:
    """A tensor of the single file: its sources (path, stored name), joined along dimension 0."""

    sources: tuple[tuple[Path, str], ...]
    spec: TensorSpec
    transposed: bool = False


def write_single_file(model: Path, out: Path, progress: Callable[[int], None]) -> None:
    """Write the model folder ``model`` to the safetensors file ``out``.

    Raises:
        CheckpointError: a component has a structure that the original code lacks.
    """
    index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
    is_xl = index["_class_name"] == "StableDiffusionXLPipeline"
    targets = {**_unet_targets(model / "unet"), **_vae_targets(model / "vae")}
    if is_xl:
        targets |= _clip_targets(model / "text_encoder", "conditioner.embedders.0.transformer.")
        targets |= _open_clip_targets(model / "text_encoder_2", "conditioner.embedders.1.model.")
    else:
        targets |= _open_clip_targets(model / "text_encoder", "cond_stage_model.model.")
    layout = {name: target.spec for name, target in targets.items()}
    write_tensors(out, layout, _read(targets, progress))


def _read(
    targets: Mapping[str, _Target], progress: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    for name, target in targets.items():
        parts = [tensor for path, key in target.sources for _, tensor in read_tensors(path, [key])]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if target.transposed:
            tensor = tensor.T
        yield name, tensor.reshape(target.spec.shape)
        progress(target.spec.bytes)


def _stored(folder: Path) -> dict[str, tuple[Path, TensorSpec]]:
    """Return file and spec of each tensor of a component."""
    return {
        name: (path, spec)
        for path in sorted(folder.glob("*.safetensors"))
        for name, spec in read_layout(path).items()
    }


def _config(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return document


def _unet_targets(folder: Path) -> dict[str, _Target]:
    config = _config(folder)
    layers = config["layers_per_block"]
    if not isinstance(layers, int):
        raise CheckpointError(
            f"{folder}: layers_per_block {layers} has no original layout; use --format diffusers"
        )
    attends = ["CrossAttn" in kind for kind in config["up_block_types"]]
    return {
        f"model.diffusion_model.{unet_name(name, layers, attends)}": _Target(((path, name),), spec)
        for name, (path, spec) in _stored(folder).items()
    }


def unet_name(name: str, layers: int, up_attends: list[bool]) -> str:
    """Return the original name of a U-Net's tensor.

    ``layers`` is the number of ResNets in a block of the encoder, one fewer than in the decoder;
    ``up_attends`` is whether each block of the decoder has attention.
    """
    layer, _, kind = name.rpartition(".")
    if layer in _UNET_LAYERS:
        return f"{_UNET_LAYERS[layer]}.{kind}"
    block, rest = _split(name, r"(down_blocks|up_blocks)\.(\d+)\.(\w+)\.(\d+)\.(.+)")
    if block is None:
        _, kind, number, rest = _match(name, r"(mid_block)\.(resnets|attentions)\.(\d+)\.(.+)")
        position = 1 if kind == "attentions" else 2 * int(number)
        return f"middle_block.{position}.{_inner(kind, rest)}"
    direction, block_number, kind, number = block
    first = int(block_number) * (layers + 1)
    if kind == "downsamplers":
        return f"input_blocks.{first + layers + 1}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        slot = 2 if up_attends[int(block_number)] else 1
        return f"output_blocks.{first + layers}.{slot}.{rest}"
    slot = 1 if kind == "attentions" else 0
    if direction == "down_blocks":
        return f"input_blocks.{1 + first + int(number)}.{slot}.{_inner(kind, rest)}"
    return f"output_blocks.{first + int(number)}.{slot}.{_inner(kind, rest)}"


def _split(name: str, pattern: str) -> tuple[tuple[str, str, str, str] | None, str]:
    match = re.fullmatch(pattern, name)
    if match is None:
        return None, ""
    direction, block, kind, number, rest = match.groups()
    return (direction, block, kind, number), rest


def _match(name: str, pattern: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, name)
    if match is None:
        raise CheckpointError(f"{name}: has no original layout; use --format diffusers")
    return match.groups()


def _inner(kind: str, rest: str) -> str:
    """Return the name inside a ResNet or an attention, whose layers have equal names."""
    if kind == "attentions":
        return rest
    layer, _, parameter = rest.rpartition(".")
    if layer not in _RESNET:
        raise CheckpointError(f"{rest}: has no original layout; use --format diffusers")
    return f"{_RESNET[layer]}.{parameter}"


def _vae_targets(folder: Path) -> dict[str, _Target]:
    blocks = len(_config(folder)["up_block_types"])
    targets = {}
    for name, (path, spec) in _stored(folder).items():
        original = vae_name(name, blocks)
        # The original attention uses 1 × 1 convolutions for its linear layers.
        is_linear = ".mid.attn_1." in original and original.endswith("weight")
        if is_linear and len(spec.shape) == 2:
            spec = TensorSpec(spec.dtype, (*spec.shape, 1, 1))
        targets[f"first_stage_model.{original}"] = _Target(((path, name),), spec)
    return targets


def vae_name(name: str, blocks: int) -> str:
    """Return the original name of an autoencoder's tensor; the decoder has ``blocks`` blocks.

    The original numbers the decoder's blocks from the highest resolution.
    """
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    if match := re.fullmatch(r"(.*)mid_block\.attentions\.0\.(.+)\.(weight|bias)", name):
        return f"{match[1]}mid.attn_1.{_VAE_ATTENTION[match[2]]}.{match[3]}"
    name = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
    up = re.compile(r"up_blocks\.(\d+)\.(resnets|upsamplers\.0)")
    kinds = {"resnets": "block", "upsamplers.0": "upsample"}
    return up.sub(lambda m: f"up.{blocks - 1 - int(m[1])}.{kinds[m[2]]}", name)


def _clip_targets(folder: Path, prefix: str) -> dict[str, _Target]:
    """Keep the names of Transformers, as Stable Diffusion XL does for CLIP-L.

    Transformers 5.6 and later store them without ``text_model``.
    """
    return {
        f"{prefix}text_model.{name.removeprefix('text_model.')}": _Target(((path, name),), spec)
        for name, (path, spec) in _stored(folder).items()
    }


def _open_clip_targets(folder: Path, prefix: str) -> dict[str, _Target]:
    """Join queries, keys and values, and transpose the projection, as OpenCLIP does."""
    targets: dict[str, _Target] = {}
    stored = {name.removeprefix("text_model."): name for name in _stored(folder)}
    entries = _stored(folder)
    for short, name in stored.items():
        path, spec = entries[name]
        if match := _QKV_NAME.fullmatch(short):
            layer, which, kind = match.groups()
            if which != "q":
                continue
            sources = tuple(
                (entries[stored[key]][0], stored[key])
                for key in (
                    f"encoder.layers.{layer}.self_attn.{projection}.{kind}" for projection in _QKV
                )
            )
            joined = TensorSpec(spec.dtype, (3 * spec.shape[0], *spec.shape[1:]))
            original = f"transformer.resblocks.{layer}.attn.in_proj_{kind}"
            targets[prefix + original] = _Target(sources, joined)
        elif short == "text_projection.weight":
            turned = TensorSpec(spec.dtype, spec.shape[::-1])
            targets[prefix + _OPEN_CLIP[short]] = _Target(((path, name),), turned, transposed=True)
        elif short != "embeddings.position_ids":
            targets[prefix + _open_clip_name(short)] = _Target(((path, name),), spec)
    return targets


def _open_clip_name(name: str) -> str:
    if name in _OPEN_CLIP:
        return _OPEN_CLIP[name]
    layer, rest = _match(name, r"encoder\.layers\.(\d+)\.(.+)")
    inner, _, kind = rest.rpartition(".")
    if inner not in _OPEN_CLIP_LAYERS:
        raise CheckpointError(f"{name}: has no original layout; use --format diffusers")
    return f"transformer.resblocks.{layer}.{_OPEN_CLIP_LAYERS[inner]}.{kind}"
