"""Low-rank adapters (LoRA) of a network, by PEFT: add, read, write and merge them.

In a network the tensors of an adapter are ``LAYER.lora_A.default.weight`` (rank, inputs) and
``LAYER.lora_B.default.weight`` (outputs, rank), and the frozen weight of the layer is
``LAYER.base_layer.weight``. Files hold ``LAYER.lora_A.weight``, with B multiplied by alpha / rank:
every reader takes that for an alpha equal to the rank, also those that ignore alpha.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.base.pip_install import install_command
from sm_train.entrypoints.job_interface.job_config import JobConfigError, LoraConfig
from sm_train.entrypoints.job_interface.lora_layers import (
    LORA_FILE,
    PEFT_CONFIG,
    PEFT_FILE,
    LayerSizes,
    is_targeted,
    layer_name,
    require_targets,
    targets_of,
)
from sm_train.entrypoints.models.component_files import (
    LocalComponents,
    tensors_identity,
)
from sm_train.entrypoints.models.weight_files import (
    Layout,
    TensorSpec,
    read_layout,
    read_tensors,
    write_tensors,
)
from torch import Tensor, nn

_A, _B = ".lora_A.", ".lora_B."
_NAME = "default"
"""PEFT's name of an adapter."""

_PEFT_PREFIX = "base_model.model."
"""PEFT's prefix of names in files."""


def is_adapter(name: str) -> bool:
    """Return whether a network's tensor belongs to an adapter."""
    return _A in name or _B in name


def base_name(name: str) -> str:
    """Return the name that a tensor or layer has in the network without an adapter."""
    return name.replace(".base_layer", "")


def extensible_layers(network: nn.Module) -> dict[str, Any]:
    """Return the layers that an adapter can extend, by their paths."""
    return {
        path: layer
        for path, layer in network.named_modules()
        # The position embedding is recomputed from the attributes of its layer.
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and not path.startswith("pos_embed.")
    }


def layer_sizes(network: nn.Module) -> LayerSizes:
    """Return the sizes of the layers that an adapter can extend, for plans."""
    counts: dict[str, dict[tuple[int, int], int]] = {}
    for path, layer in extensible_layers(network).items():
        size = (layer.weight[0].numel(), layer.weight.shape[0])
        same_name = counts.setdefault(layer_name(path), {})
        same_name[size] = same_name.get(size, 0) + 1
    return {
        name: [[*size, count] for size, count in sizes.items()] for name, sizes in counts.items()
    }


def add_adapter(network: nn.Module, lora: LoraConfig, class_name: str) -> None:
    """Freeze the network and add the adapter's weights on the meta device.

    Raises:
        JobConfigError: a target is no layer of the network, or PEFT is not installed.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise JobConfigError(
            "model.lora: peft is not installed; add it to the image, or run "
            f"{install_command('lora')}"
        ) from None
    layers = extensible_layers(network)
    require_targets(lora, class_name, map(layer_name, layers))
    targets = targets_of(lora, class_name)
    paths = [path for path in layers if is_targeted(layer_name(path), targets)]
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        # A pattern of whole paths: PEFT would take a name for the end of others, too.
        target_modules="|".join(map(re.escape, paths)),
        # The network initializes all of its weights itself, from seeds of their names.
        init_lora_weights=False,
    )
    network.requires_grad_(requires_grad=False)
    inject_adapter_in_model(config, network, adapter_name=_NAME, low_cpu_mem_usage=True)


def base_digest(folder: Path) -> str:
    """Return a digest of a network's configuration and of what its tensors hold."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    digest.update(tensors_identity(LocalComponents(folder.parent), folder.name).encode())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------ files


def scaled(lora: LoraConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a network's adapter under the names of files, with B times alpha / rank."""
    for name, tensor in tensors:
        factor = lora.alpha / lora.rank if _B in name else 1.0
        yield next(file_names([name])), tensor if factor == 1.0 else tensor * factor


def file_names(names: Iterable[str]) -> Iterator[str]:
    """Yield the names in files of an adapter's tensors in a network."""
    return (name.replace(f".{_NAME}.", ".") for name in names)


def write_adapter(
    folder: Path,
    component: str,
    class_name: str,
    layout: Layout,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    peft_format: bool,
) -> None:
    """Write the :func:`scaled` adapter of the network ``component``, its tensors in fixed order.

    diffusers' pipelines load :data:`LORA_FILE`. With ``peft_format`` the file is that of PEFT, for
    networks whose pipelines load no adapters.
    """
    prefix, file = (_PEFT_PREFIX, PEFT_FILE) if peft_format else (f"{component}.", LORA_FILE)
    named = {f"{prefix}{name}": spec for name, spec in layout.items()}
    write_tensors(folder / file, named, ((f"{prefix}{name}", tensor) for name, tensor in tensors))
    if peft_format:
        rank = next(spec.shape[0] for name, spec in layout.items() if _A in name)
        layers = [name.partition(_A)[0] for name in layout if _A in name]
        config = {
            "peft_type": "LORA",
            "auto_mapping": {"base_model_class": class_name},
            "r": rank,
            "lora_alpha": rank,
            "target_modules": "|".join(map(re.escape, layers)),
            "inference_mode": True,
        }
        content = json.dumps(config, indent=2) + "\n"
        (folder / PEFT_CONFIG).write_text(content, encoding="utf-8")


def adapter_file(folder: Path) -> Path | None:
    """Return the file of the adapter in ``folder``; None if it holds none."""
    files = (folder / name for name in (LORA_FILE, PEFT_FILE))
    return next((file for file in files if file.is_file()), None)


def read_adapter(folder: Path) -> tuple[dict[str, TensorSpec], Iterator[tuple[str, Tensor]]]:
    """Return the layout and the tensors of the adapter in ``folder``, as :func:`scaled` names them.

    Raises:
        JobConfigError: it holds none.
    """
    file = adapter_file(folder)
    if file is None:
        raise JobConfigError(f"{folder}: holds no {LORA_FILE}")
    layout = read_layout(file)
    prefix = _PEFT_PREFIX if file.name == PEFT_FILE else f"{next(iter(layout)).partition('.')[0]}."
    tensors = read_tensors(file, layout)
    return (
        {name.removeprefix(prefix): spec for name, spec in layout.items()},
        ((name.removeprefix(prefix), tensor) for name, tensor in tensors),
    )


@torch.no_grad()
def load_adapter(network: nn.Module, lora: LoraConfig, folder: Path) -> Mapping[str, Tensor]:
    """Return the full adapter of ``folder`` by the names of ``network``, which has one.

    Raises:
        JobConfigError: it is of other layers or of another rank.
    """
    layout, tensors = read_adapter(folder)
    # In a file, names end at the layer's part; the network adds the adapter's name.
    expected = {
        next(file_names([name])): tuple(tensor.shape)
        for name, tensor in network.state_dict().items()
        if is_adapter(name)
    }
    if {name: spec.shape for name, spec in layout.items()} != expected:
        raise JobConfigError(
            f"{folder}: holds an adapter of another rank or of other layers; keep model.lora as it "
            "was in the previous stage"
        )
    factor = lora.rank / lora.alpha
    return {
        re.sub(r"\.weight$", f".{_NAME}.weight", name): tensor * factor if _B in name else tensor
        for name, tensor in tensors
    }


@torch.no_grad()
def merge(network: nn.Module, adapter: Mapping[str, Tensor]) -> None:
    """Add a :func:`scaled` adapter to the weights of a network without one.

    Raises:
        RuntimeError: they do not belong together.
    """
    parameters = dict(network.named_parameters())
    for name, a in adapter.items():
        if _A not in name:
            continue
        layer = name.partition(_A)[0]
        weight = parameters.get(f"{layer}.weight")
        b = adapter[name.replace(_A, _B)]
        product = b.flatten(1).float() @ a.flatten(1).float()
        if weight is None or weight.numel() != product.numel():
            raise RuntimeError(f"the network has no layer {layer} of the adapter's size")
        weight.add_(product.reshape(weight.shape))
