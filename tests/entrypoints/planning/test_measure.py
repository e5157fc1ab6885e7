"""Stored plans are what PyTorch counts on the real networks."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sm_train.cost.speed_model import ActivationCheckpointing
from sm_train.entrypoints.distributed.fsdp import TEXT_BLOCKS, blocks
from sm_train.entrypoints.models.builder import new_autoencoder, new_text_encoders
from sm_train.entrypoints.models.components import (
    downsampling,
    preset_caption_tokens,
    preset_names,
    read_preset,
)
from sm_train.entrypoints.models.pipeline import predict
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.planning import measure, memory
from sm_train.entrypoints.planning.memory import UnplannedModelError, plan_path, plan_preset
from sm_train.entrypoints.training.parallelize import checkpoint_every_second
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.integration

SMALL = ("digits", "tiny-pixels", "tiny-sd2", "tiny-sdxl", "tiny-dit", "tiny-mmdit")
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


class LiveTensors(TorchDispatchMode):
    """Tracks operators' results that stay alive: what a forward pass leaves behind."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self._weights = {
            tensor.untyped_storage()._cdata for tensor in network.state_dict().values()
        }
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._weights:
                    self._storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        return sum(size for storage, size in self._storages.values() if storage())


class CalledOperators(TorchFunctionMode):
    """Records the names of PyTorch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def forward_pass(
    preset: dict[str, Any], resolution: int, *, checkpointing: ActivationCheckpointing = False
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A preset's network on the meta device and its forward pass on one image."""
    scale = downsampling(preset["vae"])
    side = resolution // scale
    network = Network(preset["network"], None, side).module.to_empty(device="meta").train()
    if checkpointing == "selective":
        checkpoint_every_second(network)
    elif checkpointing:
        network.enable_gradient_checkpointing()
    image, text = measure.network_inputs(preset["network"], side, preset_caption_tokens(preset))
    timesteps = torch.zeros(1, device="meta")
    return network, lambda: predict(network, image, timesteps, text, scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    [
        *SMALL,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in preset_names()
            if name not in SMALL
        ),
    ],
)
def test_stored_plan_is_what_pytorch_counts(preset: str) -> None:
    assert json.loads(plan_path(preset).read_text()) == measure.measure_preset(preset), (
        "run `make plans`"
    )


@pytest.mark.parametrize(
    ("preset", "resolution"),
    [
        ("digits", 28),
        ("tiny-sdxl", 40),
        *(
            pytest.param(preset, resolution, marks=pytest.mark.slow)
            for preset in ("sd2", "sdxl", "dit-xl", "mmdit-2b", "mmdit-8b", "mmdit-20b")
            for resolution in (384, 1152, 2048)
        ),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_quadratic_is_exact_at_sizes_it_was_not_fitted_to(
    preset: str, resolution: int, precision: str
) -> None:
    plan = plan_preset(preset, resolution, precision=precision)
    measured = measure.measure_pass(read_preset(preset), resolution, precision)
    assert plan.training_flops_per_image == 3 * measured.forward_flops
    assert plan.kept_bytes == measured.kept_bytes
    assert plan.checkpointed_bytes == measured.checkpointed_bytes + max(measured.block_bytes)
    # The autoencoder encodes in fp32, whatever the precision of training.
    in_fp32 = measure.measure_pass(read_preset(preset), resolution, "fp32")
    assert plan.encoding_bytes == in_fp32.encoding_bytes


@pytest.mark.parametrize(
    ("preset", "resolution"),
    [
        ("sd2", 256),
        ("digits", 16),
        ("dit-xl", 256),
        ("mmdit-2b", 512),
        pytest.param("sdxl", 512, marks=pytest.mark.slow),
        pytest.param("mmdit-8b", 256, marks=pytest.mark.slow),
    ],
)
def test_flops_and_parameters_are_those_of_the_unmodified_network(
    preset: str, resolution: int
) -> None:
    """Without fused attention, which has the same FLOPs."""
    network, run = forward_pass(read_preset(preset), resolution)
    with FlopCounterMode(display=False) as flops:
        run()
    plan = plan_preset(preset, resolution, precision="bf16")
    assert plan.parameters == sum(weight.numel() for weight in network.parameters())
    assert plan.training_flops_per_image == 3 * flops.get_total_flops()


@pytest.mark.parametrize("checkpointing", [False, "selective", True])
@pytest.mark.parametrize(
    ("preset", "resolution"),
    [
        ("sd2", 512),
        *(
            pytest.param(name, 512, marks=pytest.mark.slow)
            for name in ("dit-xl", "mmdit-2b", "sdxl")
        ),
    ],
)
def test_activations_are_what_a_forward_pass_leaves_alive(
    preset: str, resolution: int, *, checkpointing: ActivationCheckpointing
) -> None:
    """Counted independently of saved-tensor hooks, with PyTorch's own checkpointing."""
    network, run = forward_pass(read_preset(preset), resolution, checkpointing=checkpointing)
    with measure._GpuNumerics("fp32"), LiveTensors(network) as living:
        prediction = run()
    plan = plan_preset(preset, resolution, precision="fp32")
    expected, tolerance = plan.kept_bytes, 0.01
    if checkpointing:
        # The backward pass recomputes one block at a time.
        passes = measure.measure_pass(read_preset(preset), resolution, "fp32")
        expected = plan.checkpointed_bytes - max(passes.block_bytes)
    if checkpointing == "selective":
        # Layers are of several sizes; the plan takes half of all.
        expected, tolerance = (plan.kept_bytes + expected) // 2, 0.1
    assert expected == pytest.approx(living.bytes(), rel=tolerance)
    del prediction


@pytest.mark.skipif(not HEADER.is_file(), reason="this build of PyTorch has no headers")
@pytest.mark.parametrize("preset", SMALL)
def test_operators_are_cast_as_cuda_autocast_casts_them(preset: str) -> None:
    configuration = read_preset(preset)
    _, run = forward_pass(configuration, 32)
    with CalledOperators() as called:
        run()
        if configuration["vae"]:
            with torch.device("meta"):
                new_autoencoder(configuration["vae"]).encode(torch.empty(1, 3, 32, 32))
    header = HEADER.read_text()
    for macros, ours in (
        (
            ["AT_FORALL_LOWER_PRECISION_FP"],
            measure._CAST_TO_BF16 | {"scaled_dot_product_attention"},
        ),
        (["AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE"], measure._CAST_TO_FP32),
    ):
        operators = set()
        for macro in macros:
            [listed] = re.findall(rf"#define {macro}\(_\)((?:.*\\\n)+.*)", header)
            operators |= set(re.findall(r"_\((\w+)", listed))
        # One Python name may reach an operator under another one.
        aliases = {"__matmul__": "matmul", "__pow__": "pow", "interpolate": "upsample_nearest2d"}
        for name in called.names:
            assert (aliases.get(name, name) in operators) == (name in ours), name


@pytest.mark.parametrize("preset", ["sd2", "sdxl", "mmdit-2b", "tiny-dit"])
def test_frozen_weights_are_counted(preset: str) -> None:
    """Text encoders in bf16, the autoencoder in fp32."""
    configuration = read_preset(preset)
    with torch.device("meta"):
        vae = new_autoencoder(configuration["vae"])
        encoders = new_text_encoders(configuration["text_encoders"])
    text = sum(weight.numel() for encoder in encoders for weight in encoder.parameters())
    expected = 4 * sum(weight.numel() for weight in vae.parameters()) + 2 * text
    plan = plan_preset(preset, 256, precision="bf16")
    assert plan.frozen_bytes("replicated", 8) == expected
    units = [
        sum(weight.numel() for weight in block.parameters())
        for encoder in encoders
        for block in blocks(encoder, TEXT_BLOCKS)
    ]
    assert plan.frozen_bytes("cpu", 8) == expected - 2 * text
    # An eighth, and at least two layers, which are gathered one ahead of the other.
    sharded = plan.frozen_bytes("sharded", 8) - plan.frozen_bytes("cpu", 8)
    assert sharded >= text / 4 + 2 * sum(sorted(units)[-2:])


def test_preset_without_a_plan_names_the_command_that_plans_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PLANS", tmp_path)
    plan_preset.cache_clear()
    with pytest.raises(UnplannedModelError, match=r"not planned; run .*\.measure tiny-dit$"):
        plan_preset("tiny-dit", 8, precision="fp32")
    assert measure.write_plan("tiny-dit").parent == tmp_path
    assert plan_preset("tiny-dit", 8, precision="fp32").parameters == 53872
    plan_preset.cache_clear()
    document = json.loads((tmp_path / "tiny-dit.json").read_text())
    (tmp_path / "tiny-dit.json").write_text(json.dumps(document | {"preset_digest": "0"}))
    with pytest.raises(UnplannedModelError, match="changed since it was planned"):
        plan_preset("tiny-dit", 8, precision="fp32")
    plan_preset.cache_clear()


def test_figure_that_is_no_quadratic_is_refused() -> None:
    assert measure._quadratic({1: 6, 2: 11, 3: 18, 4: 27}) == [3, 2, 1]
    for values in ({1: 1, 2: 2, 3: 3, 4: 5}, {1: 1, 2: 2, 4: 3, 8: 4}):
        with pytest.raises(UnplannedModelError, match="not a quadratic"):
            measure._quadratic(values)
