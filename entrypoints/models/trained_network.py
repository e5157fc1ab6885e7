"""The trained network: built on the meta device, then initialized in place.

A network of 20 billion weights fits on no single GPU with its optimizer. It is built on PyTorch's
meta device and sharded there; each rank then initializes or loads its own rows of each weight.
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
from sm_train.entrypoints.base.rng import hash64
from sm_train.entrypoints.checkpoints.sharded_tensors import slices
from sm_train.entrypoints.distributed.local_shard import local_shard
from sm_train.entrypoints.job_interface.job_config import JobConfigError, LoraConfig
from sm_train.entrypoints.models.component_files import (
    ComponentFileError,
    LocalComponents,
    weight_files,
)
from sm_train.entrypoints.models.components import TRANSFORMER, UNET, learned_sigma, network_class
from sm_train.entrypoints.models.lora import (
    add_adapter,
    base_digest,
    base_name,
    is_adapter,
    load_adapter,
)
from torch import Tensor, nn

_ZERO = {
    # Diffusers' own initialization: with the original code's zeros the demo's digits were worse
    # (70 % recognized after 1,000 steps, 89 % without them).
    "UNet2DConditionModel": (),
    # AdaLN-Zero: blocks start as identities, the output as zero (arXiv 2212.09748, section 3.2).
    "PixArtTransformer2DModel": ("adaln_single.linear", "proj_out"),
    "SD3Transformer2DModel": (
        "norm1.linear",
        "norm1_context.linear",
        "norm_out.linear",
        "proj_out",
    ),
}
"""Layers that are initialized to zero, by network class and end of the layer's name."""

_ADAPTER_OUTPUT = "lora_B.default"
"""An adapter starts as zero, so that the network starts as its frozen weights."""

NETWORKS = tuple(_ZERO)
"""Diffusers' classes that can be trained."""

_POSITIONS = "pos_embed.pos_embed"
"""The buffer of a transformer's position embeddings."""


def network_folder(model: Path) -> Path | None:
    """Return the network's folder in a model in diffusers' layout; None if it has none."""
    folders = (model / name for name in (TRANSFORMER, UNET))
    return next((folder for folder in folders if folder.is_dir()), None)


def network_component(class_name: str) -> str:
    """Return the folder name of a network of diffusers' ``class_name``."""
    return UNET if class_name == "UNet2DConditionModel" else TRANSFORMER


class Network:
    """A diffusers network, on the meta device until :meth:`materialize`.

    ``config`` is a preset's. Weights are loaded from ``folder`` (in diffusers' layout) or, if that
    is None, initialized at random. ``side`` is the side of the training input in latent pixels.
    ``component`` is the name of its folder, ``module`` the network of class ``class_name``. With
    ``lora`` an adapter is trained, which starts from that of the folder ``adapter``.

    The position embeddings that a transformer stores are resized to ``side`` if all weights are
    trained. Those below an adapter (``adapted``: it is merged later) stay as they are: its file
    does not hold them, and every reader crops the table of the base at its center.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path | None,
        side: int,
        *,
        lora: LoraConfig | None = None,
        adapter: Path | None = None,
        adapted: bool = False,
    ) -> None:
        import diffusers

        self.preset_config, self.folder, self.side, self.lora = config, folder, side, lora
        self._adapter, self._resizes = adapter, lora is None and not adapted
        settings = dict(config)
        self.class_name: str = settings.pop("class")
        self.component = network_component(self.class_name)
        if folder is not None:
            settings = _read_config(folder, self.class_name)
        self._stretch = side / settings["sample_size"]
        self._drop_sigma = folder is not None and learned_sigma(settings)
        if self._drop_sigma:
            settings["out_channels"] = settings["in_channels"]
        if self.class_name == "PixArtTransformer2DModel":
            # PixArt computes positions for its sample size: scale them so that they keep the range
            # of the original resolution.
            scale = settings.get("interpolation_scale") or max(settings["sample_size"] // 64, 1)
            settings["interpolation_scale"] = scale * self._stretch
            settings["sample_size"] = side
        with torch.device("meta"):
            self.module: Any = getattr(diffusers, self.class_name).from_config(settings)
        # The pipeline takes its default image size from here.
        self.module.register_to_config(sample_size=side)
        if lora is not None:
            add_adapter(self.module, lora, self.class_name)

    def base_digest(self, seed: int) -> str | None:
        """Return a digest of the frozen weights and alpha; None if all weights are trained."""
        if self.lora is None:
            return None
        base = f"random-{seed}" if self.folder is None else base_digest(self.folder)
        return f"{base}-{self.lora.alpha:g}"

    def config(self) -> dict[str, Any]:
        """Return the configuration as diffusers saves it.

        The class name is the original one: FSDP2 renames the classes of its modules.
        """
        config: dict[str, Any] = json.loads(self.module.to_json_string())
        return config | {"_class_name": self.class_name}

    @torch.no_grad()
    def materialize(self, device: torch.device, seed: int) -> None:
        """Allocate the weights on ``device`` and initialize or load them.

        Each rank writes its own rows; the values do not depend on the sharding.

        Raises:
            JobConfigError: the folder's weights do not match this network.
        """
        self.allocate(device)
        zero = (*_ZERO[self.class_name], _ADAPTER_OUTPUT)
        if self.folder is None:
            _initialize(self.module, zero, device, seed)
        else:
            _initialize(self.module, zero, device, seed, adapter_only=True)
            _load_weights(self.module, self.folder, drop_sigma=self._drop_sigma)
        if self.lora is not None and self._adapter is not None:
            adapter = load_adapter(self.module, self.lora, self._adapter)
            for name, parameter in self.module.named_parameters():
                if name in adapter:
                    shard = local_shard(parameter)
                    shard.tensor.copy_(adapter[name][shard.rows])
        if self._resizes and self._stretch != 1.0 and _POSITIONS in self.module.state_dict():
            table = self.module.get_buffer(_POSITIONS)
            table.copy_(resize_positions(table, self._stretch))

    @torch.no_grad()
    def allocate(self, device: torch.device) -> None:
        """Allocate the weights on ``device`` without values, and compute the position buffer."""
        positions = self._positions()
        self.module.to_empty(device=device)
        if positions is not None:
            self.module.get_buffer(_POSITIONS).copy_(positions)

    def _positions(self) -> Tensor | None:
        """Return the position embeddings that diffusers computes; None if the network has none."""
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


def _read_config(folder: Path, class_name: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise JobConfigError(f"{folder}: has no readable config.json") from None
    stored_class = network_class(config)
    if stored_class != class_name:
        raise JobConfigError(
            f"{folder}: is a {stored_class}, and the preset's network a {class_name}; give another "
            "preset or folder"
        )
    return config


def resize_positions(table: Tensor, factor: float) -> Tensor:
    """Resize position embeddings (1, n², D) about their center for a larger image.

    An image of ``factor`` times the patches along a side then gets, from edge to edge, the
    positions of the smaller one. Interpolation is bicubic; beyond the table its border repeats.
    """
    side = math.isqrt(table.shape[1])
    # (1, n², D) → (1, D, n, n), which grid_sample takes.
    grid = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    # An affine map (1, 2, 3) that samples the inner 1/factor of the table at n × n points.
    scale = torch.tensor([[1 / factor, 0, 0], [0, 1 / factor, 0]], device=table.device)
    points = F.affine_grid(scale[None].to(table), list(grid.shape), align_corners=False)
    resized = F.grid_sample(
        grid, points, mode="bicubic", padding_mode="border", align_corners=False
    )
    return resized.permute(0, 2, 3, 1).reshape(table.shape)


def _initialize(
    module: nn.Module,
    zero: tuple[str, ...],
    device: torch.device,
    seed: int,
    *,
    adapter_only: bool = False,
) -> None:
    """Initialize all parameters; layers whose names end with one of ``zero`` are set to zero.

    Each rank generates the full parameter from a seed of its name, and keeps its own rows: the
    values are the same for any sharding. An adapter does not change those of other parameters.
    """
    generator = torch.Generator(device)
    for path, layer in module.named_modules():
        layer_name = base_name(path)
        set_to_zero = layer_name.endswith(zero)
        for name, parameter in layer.named_parameters(recurse=False):
            full_name = f"{layer_name}.{name}".lstrip(".")
            if adapter_only and not is_adapter(full_name):
                continue
            generator.manual_seed(int(hash64(seed, zlib.crc32(full_name.encode()))) - 2**63)
            values = torch.zeros(parameter.shape, device=device)
            if not set_to_zero:
                _init_rule(layer, name)(values, generator)
            shard = local_shard(parameter)
            shard.tensor.copy_(values[shard.rows])


def _init_rule(layer: nn.Module, name: str) -> Callable[[Tensor, torch.Generator], Any]:
    """Return PyTorch's or diffusers' initialization of a parameter, with an explicit generator."""
    if isinstance(layer, (nn.Linear, nn.Conv2d)):
        weight: Any = layer.weight
        bound = 1 / math.sqrt(weight.shape[1:].numel())
        return lambda values, generator: values.uniform_(-bound, bound, generator=generator)
    if name in ("scale_shift_table", "positional_embedding"):
        return lambda values, generator: values.normal_(
            std=values.shape[1] ** -0.5, generator=generator
        )
    if "Norm" in type(layer).__name__:
        return lambda values, _: values.fill_(float(name == "weight"))
    raise JobConfigError(f"no initialization rule for {type(layer).__name__}.{name}")


def _load_weights(module: nn.Module, folder: Path, *, drop_sigma: bool = False) -> None:
    """Load this rank's rows of all parameters and buffers from safetensors files.

    ``drop_sigma`` leaves out the output channels of a learned variance.
    """
    slices_of = dict(_stored_tensors(folder))
    if drop_sigma:
        patch: int = module.config.patch_size  # type: ignore[union-attr, assignment]
        for name in ("proj_out.weight", "proj_out.bias"):
            slices_of[name] = _MeanRows(slices_of[name], patch * patch)
    for path, tensor in module.state_dict().items():
        name = base_name(path)
        if is_adapter(name):
            continue
        if name not in slices_of:
            raise JobConfigError(f"{folder}: has no weight {name}")
        stored = slices_of[name]
        if tuple(stored.get_shape()) != tuple(tensor.shape):
            raise JobConfigError(
                f"{folder}: {name} has shape {tuple(stored.get_shape())}, and the preset's "
                f"{tuple(tensor.shape)}"
            )
        # Reads only the rows of this rank from the file.
        shard = local_shard(tensor)
        shard.tensor.copy_(stored[shard.rows])


class _MeanRows:
    """The rows of PixArt's last layer that predict the mean, as a slice of a safetensors file.

    Its rows are (patch², channels), with the mean's channels before the variance's.
    """

    def __init__(self, stored: Any, patches: int) -> None:
        rows = stored[:].unflatten(0, (patches, 2, -1))
        self._rows: Tensor = rows[:, 0].flatten(0, 1)

    def get_shape(self) -> list[int]:
        return list(self._rows.shape)

    def __getitem__(self, rows: Any) -> Tensor:
        return self._rows[rows]


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    try:
        files = weight_files(LocalComponents(folder.parent), folder.name)
    except ComponentFileError as error:
        raise JobConfigError(f"{folder.parent}: {error}") from None
    for name in files.paths:
        yield from slices(folder.parent / name)
