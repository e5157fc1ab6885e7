"""FLOP, parameters and kept activations are those that PyTorch counts on the real network."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.models.network import Network
from sm_train.entrypoints.models.pipeline import Text, predict
from sm_train.entrypoints.planning.layers import UnplannedModelError
from sm_train.entrypoints.planning.memory import plan_network, plan_preset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

TOKENS = 77


class Living(TorchDispatchMode):
    """The tensors that operators make and that live on: what a forward pass leaves behind.

    Attention's scores are left out: a GPU's fused attention never keeps them.
    """

    def __init__(self, network: torch.nn.Module, scores: set[int]) -> None:
        super().__init__()
        self._weights = {one.untyped_storage()._cdata for one in network.state_dict().values()}
        self._keys = scores
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not self._is_scores(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in self._weights:
                    continue
                elements = storage.nbytes() // tensor.element_size()
                self._storages[storage._cdata] = (weakref.ref(storage), elements)
        return result

    def _is_scores(self, tensor: torch.Tensor) -> bool:
        """(batch ·) heads × queries × keys."""
        return tensor.dim() >= 3 and {tensor.shape[-2], tensor.shape[-1]} <= self._keys

    def elements(self) -> int:
        return sum(elements for storage, elements in self._storages.values() if storage())


class Peak(Living):
    """The most elements that are alive at once."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.elements())
        return result


def asked(config: dict[str, Any], side: int, *, checkpointing: bool = False) -> Any:
    """The network on the meta device and its answer to one image."""
    network = Network(config, None, side).module.train()
    with torch.device("meta"):
        network.to_empty(device="meta")
        if checkpointing:
            network.enable_gradient_checkpointing()
        width = config.get("cross_attention_dim", config.get("joint_attention_dim"))
        width = config.get("caption_channels", width)
        pooled = config.get("pooled_projection_dim")
        if config.get("addition_embed_type"):
            sizes = 6 * config["addition_time_embed_dim"]
            pooled = config["projection_class_embeddings_input_dim"] - sizes
        text = Text(
            torch.empty(1, TOKENS, width), None if pooled is None else torch.empty(1, pooled)
        )
        image = torch.empty(1, config["in_channels"], side, side)
    return network, lambda: predict(network, image, torch.zeros(1, device="meta"), text, 8)


@pytest.mark.parametrize(
    ("preset", "side"),
    [
        ("sd2", 32),
        ("sd2", 64),
        ("digits", 16),
        ("sdxl", 64),
        ("dit-xl", 32),
        ("mmdit-2b", 64),
        ("mmdit-8b", 32),
    ],
)
def test_the_plan_is_what_pytorch_counts(preset: str, side: int) -> None:
    config = read_preset(preset)["network"]
    network, ask = asked(config, side)
    with FlopCounterMode(display=False) as flops:
        ask()
    plan = plan_network(config, side, TOKENS)
    assert plan.total.parameters == sum(weight.numel() for weight in network.parameters())
    assert 2 * plan.total.multiply_adds == flops.get_total_flops()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("preset", "side"), [("sd2", 64), ("sdxl", 64), ("dit-xl", 64), ("mmdit-2b", 64)]
)
def test_what_a_forward_pass_leaves_behind_is_as_planned(
    preset: str, side: int, *, checkpointing: bool
) -> None:
    config = read_preset(preset)["network"]
    network, ask = asked(config, side, checkpointing=checkpointing)
    tokens = [side >> level for level in range(4)] if preset.startswith("sd") else [side // 2]
    # Those of 8 × 8 are few, and as many as a head has channels.
    keys = {TOKENS, *(side**2 for side in tokens), *(side**2 + TOKENS for side in tokens)} - {64}
    with Living(network, keys) as living:
        answer = ask()
    plan = plan_network(config, side, TOKENS)
    expected = plan.activation_bytes("fp32", checkpointing=checkpointing)
    if checkpointing:
        # One block at a time is computed again, in the backward pass.
        again = [block for block in plan.blocks if block.entering is not None]
        expected -= max(block.total.kept_bytes("fp32") for block in again)
    assert expected / 4 == pytest.approx(living.elements(), rel=0.01)
    del answer


@pytest.mark.parametrize(("resolution", "tflop"), [(256, 0.543), (512, 2.413), (1024, 14.03)])
def test_sd2_costs_its_published_flop(resolution: int, tflop: float) -> None:
    plan = plan_preset("sd2", resolution, precision="bf16")
    assert plan.training_flops_per_image / 1e12 == pytest.approx(tflop, rel=0.01)
    assert plan.parameters == 865_910_724


GIB = 2**30


@pytest.mark.parametrize(
    ("preset", "strategy", "world_size", "weights", "fits_80_gb"),
    [
        ("sd2", "none", 32, 3.2, True),
        ("mmdit-8b", "none", 32, 30.0, False),
        ("mmdit-8b", "full_shard", 32, 0.9, True),
        ("mmdit-20b", "none", 128, 72.6, False),
        ("mmdit-20b", "shard_grad_op", 128, 0.6, True),
        ("mmdit-20b", "full_shard", 128, 0.6, True),
        ("mmdit-20b", "hybrid_shard", 128, 9.1, True),
    ],
)
def test_states_by_strategy(
    preset: str, strategy: str, world_size: int, weights: float, *, fits_80_gb: bool
) -> None:
    plan = plan_preset(preset, 256, precision="bf16")
    states = plan.state_bytes(ema=True, strategy=strategy, world_size=world_size, per_node=8)
    assert states.weights / GIB == pytest.approx(weights, abs=0.1)
    assert states.adamw == 2 * states.weights
    assert (states.total < 80 * GIB) == fits_80_gb
    without = plan.state_bytes(ema=False, strategy=strategy, world_size=world_size, per_node=8)
    assert states.total - without.total == states.ema == states.weights


def autoencoder(preset: str) -> torch.nn.Module:
    from diffusers import AutoencoderKL

    config = {key: one for key, one in read_preset(preset)["vae"].items() if key != "class"}
    with torch.device("meta"):
        module: torch.nn.Module = AutoencoderKL.from_config(config)
    return module.eval()


@pytest.mark.parametrize(("preset", "resolution"), [("sd2", 256), ("sdxl", 512), ("mmdit-2b", 128)])
def test_the_peak_of_encoding_is_as_planned(preset: str, resolution: int) -> None:
    module, lowest = autoencoder(preset), (resolution // 8) ** 2
    image = torch.empty(1, 3, resolution, resolution, device="meta")
    with torch.no_grad(), Peak(module, {lowest}) as alive:
        module.encode(image)  # type: ignore[operator]
    plan = plan_preset(preset, resolution, precision="fp32")
    assert plan.encoding_bytes == 4 * alive.peak


def test_a_pass_takes_what_encoding_takes_where_that_is_more() -> None:
    plan = plan_preset("sd2", 1024, precision="bf16")
    each = plan.activation_bytes(2, checkpointing=True) // 2
    assert each == plan.encoding_bytes == 12 * 128 * 1024**2
    # Two of a million pixels are encoded together, and no more.
    kept = [plan.activation_bytes(images, checkpointing=True) for images in (1, 2, 3, 100)]
    assert kept[0] == each
    assert kept[1] == kept[2] == 2 * each
    assert kept[3] > 2 * each
    without = plan_preset("digits", 16, precision="fp32")
    assert without.activation_bytes(6) == 6 * without.activation_bytes(1)


@pytest.mark.parametrize("preset", ["sd2", "sdxl", "mmdit-2b", "tiny-dit"])
def test_what_does_not_learn_is_counted(preset: str) -> None:
    """Text encoders in bf16, the autoencoder in fp32."""
    import transformers

    frozen = 2 * sum(one.numel() for one in autoencoder(preset).parameters())
    for config in read_preset(preset)["text_encoders"]:
        kind = getattr(transformers, config["class"])
        known = {key: value for key, value in config.items() if key != "class"}
        with torch.device("meta"):
            encoder = kind(kind.config_class(**known))
        frozen += sum(one.numel() for one in encoder.parameters())
    assert plan_preset(preset, 256, precision="bf16").frozen_bytes == 2 * frozen


def test_what_is_not_counted_is_refused_by_name() -> None:
    sd2 = read_preset("sd2")["network"]
    for config, named in [
        (sd2 | {"class_embed_type": "timestep"}, "class_embed_type"),
        (sd2 | {"down_block_types": ["AttnDownBlock2D"] * 4}, "AttnDownBlock2D"),
        (read_preset("mmdit-2b")["network"] | {"dual_attention_layers": [0]}, "dual_attention"),
        (read_preset("dit-xl")["network"] | {"use_additional_conditions": True}, "conditions"),
        (sd2 | {"class": "HunyuanDiT2DModel"}, "HunyuanDiT2DModel"),
    ]:
        with pytest.raises(UnplannedModelError, match=named):
            plan_network(config, 64, TOKENS)
