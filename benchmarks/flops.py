"""FLOP of a training step: ours by configuration alone, beside PyTorch's count of the real network.

For each preset, forward and backward pass of one image at a resolution, counted by
`torch.utils.flop_counter` on the meta device, where nothing is computed; ours takes no PyTorch. The
last columns say how long each count took.

    python benchmarks/flops.py
"""

from __future__ import annotations

import time
from typing import Any

import torch
from sm_train.entrypoints.models.components import downsampling, read_preset
from sm_train.entrypoints.models.network import Network
from sm_train.entrypoints.models.pipeline import Text, predict
from sm_train.entrypoints.planning.memory import plan_network
from torch.utils.flop_counter import FlopCounterMode

TOKENS = 77
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
    """Count."""
    print(
        f"{'preset':<11}{'px':>6}{'TFLOP an image':>16}{'PyTorch':>10}{'ratio':>9}"
        f"{'ours':>9}{'PyTorch':>10}"
    )
    for preset, resolution in CASES:
        config = read_preset(preset)
        side = resolution // downsampling(config["vae"])
        started = time.perf_counter()
        ours = plan_network(config["network"], side, TOKENS).training_flops
        planned = time.perf_counter()
        theirs = counted(config["network"], side)
        done = time.perf_counter()
        print(
            f"{preset:<11}{resolution:>6}{ours / 1e12:>16.3f}{theirs / 1e12:>10.3f}"
            f"{ours / theirs:>9.4f}{1e3 * (planned - started):>7.1f}ms"
            f"{1e3 * (done - planned):>8.0f}ms"
        )


def asked(config: dict[str, Any], side: int) -> tuple[Any, Any]:
    """The network on the meta device, and what asks it of one image."""
    module = Network(config, None, side).module.to_empty(device="meta")
    width = config.get("caption_channels", config.get("joint_attention_dim"))
    width = width or config["cross_attention_dim"]
    pooled = config.get("pooled_projection_dim")
    if config.get("addition_embed_type"):
        sizes = 6 * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - sizes
    with torch.device("meta"):
        text = Text(
            torch.empty(1, TOKENS, width), None if pooled is None else torch.empty(1, pooled)
        )
        image, timesteps = torch.empty(1, config["in_channels"], side, side), torch.empty(1)
    return module, lambda: predict(module, image, timesteps, text, 8)


def counted(config: dict[str, Any], side: int) -> int:
    """PyTorch's count of both passes."""
    module, ask = asked(config, side)
    module.train()
    with FlopCounterMode(display=False) as flops:
        ask().sum().backward()
    return int(flops.get_total_flops())


if __name__ == "__main__":
    main()
