"""Measure what presets need of a GPU and write the figures that planning reads without PyTorch.

PyTorch counts on the meta device, where nothing is computed: FLOPs with ``FlopCounterMode``, and
activations with saved-tensor hooks. Each figure is a quadratic in the image's area: attention's
FLOPs grow with the square of the number of tokens, everything else in proportion to it. Three
sizes determine the coefficients, and a fourth one confirms them.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.distributed.fsdp import TEXT_BLOCKS, blocks, modulation_layers
from sm_train.entrypoints.job_interface.job_config import LoraConfig
from sm_train.entrypoints.job_interface.optimizer_rules import OPTIMIZERS, state_bytes
from sm_train.entrypoints.models.builder import new_autoencoder, new_text_encoders
from sm_train.entrypoints.models.components import (
    downsampling,
    preset_caption_tokens,
    read_preset,
)
from sm_train.entrypoints.models.fp8_layers import fp8_layers
from sm_train.entrypoints.models.lora import layer_sizes
from sm_train.entrypoints.models.pipeline import T5_TOKENS, Text, predict
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.planning.memory import (
    UNMEASURED,
    UnplannedModelError,
    plan_path,
    preset_digest,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

_PRECISIONS = ("bf16", "fp32")
_FIT_STEPS, _CHECK_STEPS = (4, 8, 12), 16
"""Sides of the measured images, in resolution steps (:func:`resolution_step`)."""

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20
"""DistributedDataParallel's limits: of the first bucket, and of others (``bucket_cap_mb``)."""

_CAST_TO_BF16 = frozenset(
    ("linear", "conv2d", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum")
)
_CAST_TO_FP32 = frozenset(
    ("layer_norm", "group_norm", "rms_norm", "rsqrt", "pow", "__pow__", "exp", "softmax")
) | {"interpolate"}
"""Operators by CUDA autocast's casting rule (PyTorch's ``ATen/autocast_mode.h``, 2.13), as far as
diffusers' networks call them."""


@dataclass(frozen=True)
class PassMeasurement:
    """One forward pass on one image of ``resolution`` pixels a side, in one precision.

    ``kept_bytes`` are those that autograd keeps for the backward pass. With activation
    checkpointing it keeps ``checkpointed_bytes``, and while it recomputes a block, those of
    ``block_bytes`` in addition. Layers that can compute in fp8 take ``fp8_flops`` of the forward
    pass, and cast ``fp8_numbers`` numbers in both passes. The autoencoder takes ``encoding_flops``
    for the image, and ``encoding_bytes`` at its peak.
    """

    forward_flops: int
    kept_bytes: int
    checkpointed_bytes: int
    block_bytes: tuple[int, ...]
    encoding_flops: int
    encoding_bytes: int
    fp8_flops: int
    fp8_numbers: int


class _GpuNumerics(TorchFunctionMode):
    """Runs operators on the meta device in the precision and with the attention of a GPU.

    Meta tensors take neither CUDA's autocast nor a fused attention kernel: without this mode they
    would keep fp32 tensors and attention's (T, T) scores. ``weight_casts`` are the storages of
    weights that were cast; the plan counts those with the weights.
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self._autocast = precision == "bf16"
        self.weight_casts = _Storages()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        attention = name == "scaled_dot_product_attention"
        if self._autocast and (attention or name in _CAST_TO_BF16):
            args, kwargs = self._cast((args, kwargs), torch.bfloat16)
        elif self._autocast and name in _CAST_TO_FP32:
            args, kwargs = self._cast((args, kwargs), torch.float32)
        if attention:
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, arguments: Any, dtype: torch.dtype) -> Any:
        def cast(argument: Any) -> Any:
            if not isinstance(argument, Tensor) or not argument.is_floating_point():
                return argument
            converted = argument.to(dtype)
            if isinstance(argument, nn.Parameter) and torch.is_grad_enabled():
                self.weight_casts.add(converted)
            return converted

        return tree_map(cast, arguments)


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Emulate FlashAttention: autograd keeps inputs, output and a log-sum-exp for each query.

    The memory-efficient kernel, which takes a mask, keeps the same and the small mask.
    """
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return result


class _Storages:
    """A set of tensor storages.

    Holds the storages themselves: the addresses of freed ones would be used again. On the meta
    device they occupy no memory.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._by_address: dict[int, Any] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._by_address[storage._cdata] = storage

    def bytes_without(self, *others: _Storages) -> int:
        """Return the size of the storages that are in none of ``others``."""
        excluded = {address for other in others for address in other._by_address}
        return sum(
            storage.nbytes()
            for address, storage in self._by_address.items()
            if address not in excluded
        )

    def __or__(self, other: _Storages) -> _Storages:
        union = _Storages()
        union._by_address = self._by_address | other._by_address
        return union


def _saved_to(storages: _Storages) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context that adds what autograd saves for the backward pass to ``storages``."""

    def pack(tensor: Tensor) -> Tensor:
        storages.add(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Tracks ``peak``, the most bytes of operators' results that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.peak = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], nn.Parameter) and func is torch.ops.aten._to_copy.default:
            # Autocast's copy of a frozen weight lives for one layer; the plan leaves it out.
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        self._alive = {key: pair for key, pair in self._alive.items() if pair[0]() is not None}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def resolution_step(preset: Mapping[str, Any]) -> int:
    """Return the pixels by which an image's side may grow so that no layer's input is rounded."""
    network = preset["network"]
    if "block_out_channels" in network:
        divisor = 2 ** (len(network["block_out_channels"]) - 1)
    else:
        divisor = network["patch_size"]
    return int(downsampling(preset["vae"]) * divisor)


def measure_pass(
    preset: Mapping[str, Any], resolution: int, precision: str, lora: LoraConfig | None = None
) -> PassMeasurement:
    """Run one forward pass of a preset's network, with an adapter or not, on the meta device."""
    scale = downsampling(preset["vae"])
    config, side = preset["network"], resolution // scale
    network = Network(config, None, side, lora=lora).module.to_empty(device="meta").train()
    image, text = network_inputs(config, side, preset_caption_tokens(preset))
    timesteps = torch.zeros(1, device="meta")
    saved, arguments, in_blocks = _Storages(), _Storages(), list[_Storages]()

    def run_block(block: Callable[..., Any], *inputs: Any) -> Any:
        # Stands in for torch.utils.checkpoint, which keeps a block's arguments.
        for tensor in inputs:
            if isinstance(tensor, Tensor):
                arguments.add(tensor)
        in_blocks.append(_Storages())
        with _saved_to(in_blocks[-1]):
            return block(*inputs)

    network.enable_gradient_checkpointing(run_block)
    numerics = _GpuNumerics(precision)
    products = _ProductSizes(fp8_layers(network).values())
    with FlopCounterMode(display=False) as flops, numerics, _saved_to(saved):
        predict(network, image, timesteps, text, scale)
    weights = _Storages(network.parameters()) | numerics.weight_casts
    outside = saved | arguments
    everything = saved
    for in_block in in_blocks:
        everything = everything | in_block
    return PassMeasurement(
        int(flops.get_total_flops()),
        everything.bytes_without(weights),
        outside.bytes_without(weights),
        tuple(in_block.bytes_without(weights, outside) for in_block in in_blocks),
        *_encoding(preset["vae"], resolution, precision),
        products.flops,
        products.cast_numbers,
    )


class _ProductSizes:
    """Adds up the sizes of the matrix products of linear layers.

    A product takes 2 · rows · inputs · outputs FLOPs. In fp8 the forward pass casts its input, the
    backward pass the gradient of its output, and the input again, transposed.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self.flops = self.cast_numbers = 0
        for layer in layers:
            layer.register_forward_pre_hook(self._add)

    def _add(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        rows = inputs[0].numel() // layer.in_features
        self.flops += 2 * rows * layer.in_features * layer.out_features
        self.cast_numbers += rows * (2 * layer.in_features + layer.out_features)


def network_inputs(config: Mapping[str, Any], side: int, tokens: int) -> tuple[Tensor, Text]:
    """Return one noisy image (1, C, H, W) and one encoded caption for a network's configuration."""
    width = config.get("caption_channels", config.get("joint_attention_dim"))
    pooled = config.get("pooled_projection_dim")
    if config.get("addition_embed_type") == "text_time":
        # SDXL joins the pooled caption with the embeddings of six sizes.
        sizes = 6 * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - sizes
    with torch.device("meta"):
        states = torch.empty(1, tokens, width or config["cross_attention_dim"])
        text = Text(states, None if pooled is None else torch.empty(1, pooled))
        return torch.empty(1, config["in_channels"], side, side), text


def gradient_buckets(preset: Mapping[str, Any]) -> list[int]:
    """Return the bytes of DDP's gradient buckets in the order in which they are reduced.

    DDP fills its buckets in the order in which the first backward pass completes the gradients. A
    bucket ends with the gradient that reaches its limit.
    """
    step = resolution_step(preset)
    scale = downsampling(preset["vae"])
    network = Network(preset["network"], None, step // scale).module.to_empty(device="meta").train()
    image, text = network_inputs(preset["network"], step // scale, preset_caption_tokens(preset))
    ready: list[Tensor] = []
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(ready.append)
    with _GpuNumerics("bf16"):
        predicted = predict(network, image, torch.zeros(1, device="meta"), text, scale)
    predicted.float().sum().backward()  # type: ignore[no-untyped-call]
    limits = [_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
    buckets, _ = dist._compute_bucket_assignment_by_size(ready, limits)  # type: ignore[attr-defined]
    return [sum(ready[index].nbytes for index in bucket) for bucket in buckets]


def _encoding(config: Mapping[str, Any] | None, resolution: int, precision: str) -> tuple[int, int]:
    """Return the FLOPs of encoding one image, and the peak of its memory in bytes."""
    if config is None:
        return 0, 0
    with torch.device("meta"):
        vae = new_autoencoder(config).eval()
        image = torch.empty(1, config["in_channels"], resolution, resolution)
    memory, flops = PeakMemory(), FlopCounterMode(display=False)
    with torch.no_grad(), flops, memory, _GpuNumerics(precision):
        vae.encode(image)
    return int(flops.get_total_flops()), memory.peak


def caption_flops(preset: Mapping[str, Any]) -> int:
    """Return the FLOPs of encoding one caption with a preset's text encoders."""
    with torch.device("meta"):
        encoders = new_text_encoders(preset["text_encoders"])
    with torch.no_grad(), FlopCounterMode(display=False) as flops, _GpuNumerics("fp32"):
        for encoder in encoders:
            length = getattr(encoder.config, "max_position_embeddings", T5_TOKENS)
            # Padding takes the same FLOPs; a mask would depend on values.
            encoder(torch.zeros(1, length, dtype=torch.long, device="meta"))
    return int(flops.get_total_flops())


def measure_preset(name: str, content: str | None = None) -> dict[str, Any]:
    """Return the document of a preset's plan; ``content`` is the JSON of a custom preset.

    Raises:
        JobConfigError: there is no such preset.
        UnplannedModelError: a figure is not a quadratic in the image's area, or the network takes
            no single image.
    """
    preset = read_preset(name, content)
    try:
        return _measured(preset)
    except UnplannedModelError:
        raise
    except Exception as error:
        # A normalization with one value per channel has no statistics of one image.
        if not _takes_two_images(preset):
            raise
        reason = str(error).partition("\n")[0]
        raise UnplannedModelError(f"the network takes no single image: {reason}") from None


def _takes_two_images(preset: Mapping[str, Any]) -> bool:
    """Return whether the network can be built and trains on a batch of two."""
    step, scale = resolution_step(preset), downsampling(preset["vae"])
    try:
        side = step // scale
        network = Network(preset["network"], None, side).module.to_empty(device="meta").train()
        image, text = network_inputs(preset["network"], side, preset_caption_tokens(preset))
        pooled = None if text.pooled is None else text.pooled.expand(2, -1)
        twice = Text(text.states.expand(2, -1, -1), pooled)
        predict(network, image.expand(2, -1, -1, -1), torch.zeros(2, device="meta"), twice, scale)
    except Exception:
        return False
    return True


def _measured(preset: Mapping[str, Any]) -> dict[str, Any]:
    step = resolution_step(preset)
    network = Network(preset["network"], None, step).module
    with torch.device("meta"):
        vae = new_autoencoder(preset["vae"]) if preset["vae"] else nn.Module()
        encoders = new_text_encoders(preset["text_encoders"])
    return {
        "preset_digest": preset_digest(preset),
        "resolution_step": step,
        "parameters": _count(network),
        "lora_layers": layer_sizes(network),
        "optimizer_bytes": _optimizer_bytes(network),
        "fsdp_block_parameters": [_count(block) for block in blocks(network)],
        "modulation_parameters": [
            sum(map(_count, modulation_layers(block).values())) for block in blocks(network)
        ],
        "ddp_buckets": len(gradient_buckets(preset)),
        "vae_parameters": _count(vae),
        "text_encoder_parameters": sum(map(_count, encoders)),
        "text_encoder_units": [count for encoder in encoders for count in _units(encoder)],
        "fp8_parameters": sum(map(_count, fp8_layers(network).values())),
        "caption_flops": caption_flops(preset),
        "precisions": {precision: _fit(preset, step, precision) for precision in _PRECISIONS},
    }


def _units(encoder: nn.Module) -> list[int]:
    """Return the parameters of each unit in which FSDP2 gathers a text encoder, in order."""
    layers = [_count(layer) for layer in blocks(encoder, TEXT_BLOCKS)]
    return [_count(encoder) - sum(layers), *layers]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _optimizer_bytes(network: nn.Module) -> dict[str, int]:
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    return {name: state_bytes(name, shapes) for name in OPTIMIZERS}


def _fit(preset: Mapping[str, Any], step: int, precision: str) -> dict[str, Any]:
    passes = {
        steps: measure_pass(preset, steps * step, precision)
        for steps in (*_FIT_STEPS, _CHECK_STEPS)
    }

    def fitted(figure: Callable[[PassMeasurement], int]) -> list[int]:
        return _quadratic({steps**2: figure(found) for steps, found in passes.items()})

    block_count = len(passes[_CHECK_STEPS].block_bytes)
    in_blocks = [fitted(lambda found, n=n: found.block_bytes[n]) for n in range(block_count)]  # type: ignore[misc]
    return {
        "forward_flops": fitted(lambda found: found.forward_flops),
        "kept_bytes": fitted(lambda found: found.kept_bytes),
        "checkpointed_bytes": fitted(lambda found: found.checkpointed_bytes),
        "block_bytes": _largest(in_blocks),
        "encoding_flops": fitted(lambda found: found.encoding_flops),
        "encoding_bytes": fitted(lambda found: found.encoding_bytes),
        "fp8_flops": fitted(lambda found: found.fp8_flops),
        "fp8_numbers": fitted(lambda found: found.fp8_numbers),
    }


def _quadratic(values: Mapping[int, int]) -> list[int]:
    """Return ``[c0, c1, c2]`` so that ``c0 + c1·area + c2·area²`` passes through all ``values``.

    Newton's divided differences of the first three points, in exact arithmetic.
    """
    (a, fa), (b, fb), (c, fc), *others = values.items()
    slope = Fraction(fb - fa, b - a)
    curve = (Fraction(fc - fb, c - b) - slope) / (c - a)
    exact = [fa - slope * a + curve * a * b, slope - curve * (a + b), curve]
    rounded = [int(coefficient) for coefficient in exact]
    c0, c1, c2 = rounded
    if rounded != exact or any(c0 + c1 * x + c2 * x * x != y for x, y in others):
        raise UnplannedModelError(f"not a quadratic in the image's area: {dict(values)}")
    return rounded


def _largest(candidates: Sequence[list[int]]) -> list[list[int]]:
    """Return the quadratics that can be the largest one at some size, without repetition."""
    distinct = sorted({tuple(candidate) for candidate in candidates}, reverse=True)
    return [
        list(curve)
        for curve in distinct
        if not any(
            curve != other and all(x <= y for x, y in zip(curve, other, strict=True))
            for other in distinct
        )
    ]


def write_plan(name: str, content: str | None = None) -> Path:
    """Measure a preset and write its plan next to the shipped ones, or to the user's cache."""
    path = plan_path(name, content)
    document = json.dumps(measure_preset(name, content), indent=1)
    # One line for each list of numbers.
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (_inline_lists(document) + "\n").encode())
    return path


def _inline_lists(document: str) -> str:
    import re

    return re.sub(r"\[[^\[\]]*\]", lambda match: " ".join(match[0].split()), document)


def main() -> None:
    """Write the plans of the presets named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sm_train.entrypoints.planning.measure",
        description="Measure the FLOPs and the memory of model presets with PyTorch and write the "
        "figures that `sm-train check` and `sm-train cost` read.",
    )
    parser.add_argument(
        "presets",
        nargs="+",
        metavar="PRESET",
        help="JSON file of a preset, or the name of a shipped one",
    )
    for name in parser.parse_args().presets:
        content = Path(name).read_text(encoding="utf-8") if name.endswith(".json") else None
        try:
            print(f"{name}: wrote {write_plan(name, content)}", flush=True)
        except UnplannedModelError as error:
            parser.exit(UNMEASURED, f"{name}: {error}\n")
        except Exception as error:
            # Whatever diffusers and PyTorch raise for sizes that do not fit together.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise SystemExit(f"{name}: {reason}") from None


if __name__ == "__main__":
    main()
