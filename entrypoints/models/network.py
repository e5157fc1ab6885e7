"""The network that is trained: built without memory, then filled in place.

A network of 20 billion weights is nowhere whole: it is built on PyTorch's meta device, split
among processes there, and every process then draws or reads its own rows of each weight.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from sm_train.entrypoints.checkpointing.sharded_tensors import slices
from sm_train.entrypoints.common.job_config import JobConfigError
from sm_train.entrypoints.common.rng import hash64
from sm_train.entrypoints.distributed.local_shard import local_shard
from torch import Tensor, nn

TRANSFORMER, UNET = "transformer", "unet"
"""Folders of a network in diffusers' layout."""

_ZERO = {
    # As diffusers' class begins: with the original code's zeros the demo's digits came out worse
    # (70 % recognised after 1,000 steps, 89 % without them).
    "UNet2DConditionModel": (),
    # AdaLN-Zero: blocks begin as identities, the output as zero (arXiv 2212.09748, section 3.2).
    "PixArtTransformer2DModel": ("adaln_single.linear", "proj_out"),
    "SD3Transformer2DModel": (
        "norm1.linear",
        "norm1_context.linear",
        "norm_out.linear",
        "proj_out",
    ),
}
"""Layers that begin as zero, by the end of their name."""

NETWORKS = tuple(_ZERO)
"""Diffusers' classes that can be trained."""

_POSITIONS = "pos_embed.pos_embed"


def network_folder(model: Path) -> Path | None:
    """Where ``model``, in diffusers' layout, has its network; None where there is none."""
    return next((one for name in (TRANSFORMER, UNET) if (one := model / name).is_dir()), None)


class Network:
    """``module``, of diffusers' class ``class_name``, is on the meta device until :meth:`fill`.

    ``config`` is a preset's; weights come from ``folder`` (in diffusers' layout) or, where that is
    None, are drawn. ``side`` is that of its input in training. ``part`` names its folder.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path | None, side: int) -> None:
        import diffusers

        settings = dict(config)
        self.class_name: str = settings.pop("class")
        self.part = UNET if self.class_name == "UNet2DConditionModel" else TRANSFORMER
        kind = getattr(diffusers, self.class_name)
        if folder is not None:
            settings = _read_config(folder, self.class_name)
        self._folder, self._stretch = folder, side / settings["sample_size"]
        if self.class_name == "PixArtTransformer2DModel":
            # Its positions are computed for its size: they shall span what they spanned before.
            before = settings.get("interpolation_scale") or max(settings["sample_size"] // 64, 1)
            settings["interpolation_scale"] = before * self._stretch
            settings["sample_size"] = side
        with torch.device("meta"):
            self.module: Any = kind.from_config(settings)
        # Where the pipeline takes its default size from.
        self.module.register_to_config(sample_size=side)

    def config(self) -> dict[str, Any]:
        """As diffusers saves it. FSDP2 gives its modules classes of other names."""
        config: dict[str, Any] = json.loads(self.module.to_json_string())
        return config | {"_class_name": self.class_name}

    @torch.no_grad()
    def fill(self, device: torch.device, seed: int) -> None:
        """Give the weights memory on ``device`` and their first values.

        Each process fills the rows that it owns; the values do not depend on how they are split.

        Raises:
            SettingsError: the folder's weights are not those of this network.
        """
        self.allocate(device)
        if self._folder is None:
            _draw_all(self.module, _ZERO[self.class_name], device, seed)
        else:
            _read_all(self.module, self._folder)
        if self._stretch != 1.0 and _POSITIONS in self.module.state_dict():
            table = self.module.get_buffer(_POSITIONS)
            table.copy_(stretched(table, self._stretch))

    @torch.no_grad()
    def allocate(self, device: torch.device) -> None:
        """Give the weights memory on ``device``, but no values; those of buffers are computed."""
        positions = self._positions()
        self.module.to_empty(device=device)
        if positions is not None:
            self.module.get_buffer(_POSITIONS).copy_(positions)

    def _positions(self) -> Tensor | None:
        """The table of positions that diffusers computes, if the network has one."""
        embedding: Any = getattr(self.module, "pos_embed", None)
        if embedding is None:
            return None
        side = embedding.base_size * embedding.patch_size
        table: Tensor = type(embedding)(
            height=side,
            width=side,
            patch_size=embedding.patch_size,
            in_channels=embedding.proj.in_channels,
            embed_dim=embedding.proj.out_channels,
            interpolation_scale=embedding.interpolation_scale,
            pos_embed_max_size=embedding.pos_embed_max_size,
        ).pos_embed
        return table


def _read_config(folder: Path, kind: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise JobConfigError(f"{folder}: has no config.json that can be read") from None
    if config.get("_class_name") != kind:
        found = config.get("_class_name")
        raise JobConfigError(f"{folder}: is a {found}, and the preset's network a {kind}")
    return config


def stretched(table: Tensor, factor: float) -> Tensor:
    """A table of positions (1, n², D) resized about its centre, as the image in it has grown.

    An image of ``factor`` times the patches along a side then finds, from edge to edge, the
    positions that the smaller one had; bicubic, the table's edge goes on beyond it.
    """
    side = math.isqrt(table.shape[1])
    grid = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    scale = torch.tensor([[1 / factor, 0, 0], [0, 1 / factor, 0]], device=table.device)
    points = F.affine_grid(scale[None].to(table), list(grid.shape), align_corners=False)
    resized = F.grid_sample(
        grid, points, mode="bicubic", padding_mode="border", align_corners=False
    )
    return resized.permute(0, 2, 3, 1).reshape(table.shape)


# ---------------------------------------------------------------------- first values


def _draw_all(module: nn.Module, zero: tuple[str, ...], device: torch.device, seed: int) -> None:
    generator = torch.Generator(device)
    for owner_name, owner in module.named_modules():
        begins_as_zero = owner_name.endswith(zero)
        for name, parameter in owner.named_parameters(recurse=False):
            full_name = f"{owner_name}.{name}".lstrip(".")
            generator.manual_seed(int(hash64(seed, zlib.crc32(full_name.encode()))) - 2**63)
            whole = torch.zeros(parameter.shape, device=device)
            if not begins_as_zero:
                _rule(owner, name)(whole, generator)
            own = local_shard(parameter)
            own.tensor.copy_(whole[own.rows])


def _rule(owner: nn.Module, name: str) -> Callable[[Tensor, torch.Generator], Any]:
    """How PyTorch and diffusers begin a parameter, on a generator of its own."""
    if isinstance(owner, (nn.Linear, nn.Conv2d)):
        weight: Any = owner.weight
        bound = 1 / math.sqrt(weight.shape[1:].numel())
        return lambda whole, generator: whole.uniform_(-bound, bound, generator=generator)
    if name == "scale_shift_table":
        return lambda whole, generator: whole.normal_(
            std=whole.shape[1] ** -0.5, generator=generator
        )
    if "Norm" in type(owner).__name__:
        return lambda whole, _: whole.fill_(float(name == "weight"))
    raise JobConfigError(f"no rule for how {type(owner).__name__}.{name} begins")


# ---------------------------------------------------------------------- from a folder


def _read_all(module: nn.Module, folder: Path) -> None:
    found = dict(_stored(folder))
    for name, tensor in module.state_dict().items():
        if name not in found:
            raise JobConfigError(f"{folder}: has no weight {name}")
        stored = found[name]
        if tuple(stored.get_shape()) != tuple(tensor.shape):
            raise JobConfigError(
                f"{folder}: {name} is {tuple(stored.get_shape())}, not {tuple(tensor.shape)}"
            )
        own = local_shard(tensor)
        own.tensor.copy_(stored[own.rows])


def _stored(folder: Path) -> Iterator[tuple[str, Any]]:
    files = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
    if not files:
        raise JobConfigError(f"{folder}: has no diffusion_pytorch_model.safetensors")
    for path in files:
        yield from slices(path)
