"""FLOPs of a training step: the stored plans against PyTorch's count of forward and backward pass.

For each preset one image, counted by ``torch.utils.flop_counter`` on the meta device, where nothing
is computed. A plan takes the backward pass as twice the forward pass; PyTorch leaves out the
gradient of the first layer's input. The last columns are the times to read a plan and to count.

    python benchmarks/flops.py
"""

from __future__ import annotations

import time

import torch
from sm_train.entrypoints.models.components import (
    downsampling,
    preset_caption_tokens,
    read_preset,
)
from sm_train.entrypoints.models.pipeline import predict
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.planning.measure import network_inputs
from sm_train.entrypoints.planning.memory import plan_preset
from torch.utils.flop_counter import FlopCounterMode

CASES = (
    ("sd2", 256),
    ("sd2", 512),
    ("sd2", 1024),
    ("sdxl", 1024),
    ("dit-xl", 512),
    ("mmdit-2b", 512),
    ("mmdit-8b", 1024),
    ("mmdit-20b", 1024),
)


def main() -> None:
    """Print a line for each case."""
    print(
        f"{'preset':<11}{'px':>6}{'TFLOP an image':>16}{'PyTorch':>10}{'ratio':>9}"
        f"{'plan':>9}{'PyTorch':>10}"
    )
    for preset, resolution in CASES:
        started = time.perf_counter()
        planned = plan_preset(preset, resolution, precision="bf16").training_flops_per_image
        read = time.perf_counter()
        counted = count_training_flops(preset, resolution)
        done = time.perf_counter()
        print(
            f"{preset:<11}{resolution:>6}{planned / 1e12:>16.3f}{counted / 1e12:>10.3f}"
            f"{planned / counted:>9.4f}{1e3 * (read - started):>7.1f}ms"
            f"{1e3 * (done - read):>8.0f}ms"
        )


def count_training_flops(name: str, resolution: int) -> int:
    """PyTorch's count of a forward and a backward pass on one image."""
    preset = read_preset(name)
    scale = downsampling(preset["vae"])
    side = resolution // scale
    network = Network(preset["network"], None, side).module.to_empty(device="meta").train()
    image, text = network_inputs(preset["network"], side, preset_caption_tokens(preset))
    timesteps = torch.zeros(1, device="meta")
    with FlopCounterMode(display=False) as flops:
        predict(network, image, timesteps, text, scale).sum().backward()  # type: ignore[no-untyped-call]
    return int(flops.get_total_flops())


if __name__ == "__main__":
    main()
