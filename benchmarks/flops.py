"""FLOP of a training step: ours by configuration alone, beside PyTorch's count of the real network.

For each preset, forward and backward pass of one image at a resolution, counted by
`torch.utils.flop_counter` on the meta device, where nothing is computed; ours takes no PyTorch. The
last columns say how long each count took. Where there is a GPU, `sd2` then trains at 256 and 512
pixels in bf16 on latents that are there already, and images/s and MFU are printed beside published
figures: 127 images/s on an H100 at 512 pixels from precomputed latents (MLPerf Training 4.0).

    python benchmarks/flops.py
"""

from __future__ import annotations

import time
from typing import Any

import torch
from sm_train.entrypoints.components import downsampling, read_preset
from sm_train.entrypoints.memory_plan import plan_network
from sm_train.entrypoints.networks import Network
from sm_train.entrypoints.pipeline import Text, predict
from sm_train.entrypoints.utilization import PEAK_FLOPS
from torch.utils.flop_counter import FlopCounterMode

TOKENS = 77
CASES = (
    ("sd2", 256), ("sd2", 512), ("sd2", 1024), ("sdxl", 1024), ("dit-xl", 512), ("mmdit-2b", 512),
    ("mmdit-8b", 1024), ("mmdit-20b", 1024),
)  # fmt: skip
PUBLISHED = {512: 127.0}
"""Images/s on one H100, with precomputed latents and texts."""

BATCH = {256: 128, 512: 64}
STEPS, WARM = 20, 5


def main() -> None:
    """Count, and train where there is a GPU."""
    print(f"{'preset':<11}{'px':>6}{'TFLOP an image':>16}{'PyTorch':>10}{'ratio':>9}"
          f"{'ours':>9}{'PyTorch':>10}")  # fmt: skip
    for preset, resolution in CASES:
        config = read_preset(preset)
        side = resolution // downsampling(config["vae"])
        started = time.perf_counter()
        ours = plan_network(config["network"], side, TOKENS).training_flops
        planned = time.perf_counter()
        theirs = counted(config["network"], side)
        done = time.perf_counter()
        print(f"{preset:<11}{resolution:>6}{ours / 1e12:>16.3f}{theirs / 1e12:>10.3f}"
              f"{ours / theirs:>9.4f}{1e3 * (planned - started):>7.1f}ms"
              f"{1e3 * (done - planned):>8.0f}ms")  # fmt: skip
    if not torch.cuda.is_available():
        print("no GPU: images/s and MFU are not measured")
        return
    for resolution in BATCH:
        measure(resolution)


def made(config: dict[str, Any], side: int, batch: int, device: str) -> tuple[Network, Any]:
    """The network, and what asks it of ``batch`` images."""
    network = Network(config, None, side)
    if device == "meta":
        network.module.to_empty(device="meta")
    else:
        network.fill(torch.device(device), 0)
    width = config.get("caption_channels", config.get("joint_attention_dim"))
    width = width or config["cross_attention_dim"]
    pooled = config.get("pooled_projection_dim")
    if config.get("addition_embed_type"):
        sizes = 6 * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - sizes
    with torch.device(device):
        text = Text(
            torch.zeros(batch, TOKENS, width),
            None if pooled is None else torch.zeros(batch, pooled),
        )
        image, timesteps = torch.zeros(batch, config["in_channels"], side, side), torch.ones(batch)
    return network, lambda: predict(network.module, image, timesteps, text, 8)


def counted(config: dict[str, Any], side: int) -> int:
    """PyTorch's count of both passes."""
    network, ask = made(config, side, 1, "meta")
    network.module.train()
    with FlopCounterMode(display=False) as flops:
        ask().sum().backward()
    return int(flops.get_total_flops())


def measure(resolution: int) -> None:
    """Train sd2 on the GPU: forward, backward, clip and AdamW."""
    config = read_preset("sd2")["network"]
    network, ask = made(config, resolution // 8, BATCH[resolution], "cuda")
    module = network.module.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    for number in range(WARM + STEPS):
        if number == WARM:
            torch.cuda.synchronize()
            started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = ask().float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    images = STEPS * BATCH[resolution] / (time.perf_counter() - started)
    flops = plan_network(config, resolution // 8, TOKENS).training_flops
    name = torch.cuda.get_device_name()
    peak = next((value for part, value in PEAK_FLOPS.items() if part in name), None)
    mfu = f", MFU {images * flops / peak:.0%}" if peak else ""
    beside = PUBLISHED.get(resolution)
    ratio = f", {images / beside:.2f} × {beside:.0f} on an H100 (MLPerf 4.0)" if beside else ""
    print(f"sd2 at {resolution} px on {name}: {images:.1f} images/s{mfu}{ratio}")


if __name__ == "__main__":
    main()
