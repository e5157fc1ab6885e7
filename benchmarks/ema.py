"""One EMA update of the weights, against diffusers' EMAModel and the memory bandwidth.

The weights are those of a preset, in fp32 and with its tensor sizes; the default is dit-xl with
611 million. An update reads averages and weights and writes averages: the limit is a copy within
memory, which moves two thirds of those bytes. The variants are interleaved; the output is medians,
spread and the median ratio of a round, also in CPU time, which other programs on the machine
disturb less. Runs on a GPU if there is one.

    python benchmarks/ema.py [PRESET [MILLIONS]]  # a part of the weights, where memory is short
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from diffusers.training_utils import EMAModel
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.training.ema import ExponentialMovingAverage

ROUNDS = 9


def main() -> None:
    """Measure on the GPU or the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset, limit = (*sys.argv[1:], *["dit-xl", "inf"][len(sys.argv) - 1 :])
    with torch.device("meta"):
        network = Network(read_preset(preset)["network"], None, 64).module
    parameters: list[torch.nn.Parameter] = []
    count = 0
    for weight in network.parameters():
        if count < float(limit) * 1e6:
            parameters.append(torch.nn.Parameter(torch.randn(weight.shape, device=device)))
            count += weight.numel()
    ema = ExponentialMovingAverage(parameters, 0.999)
    reference = EMAModel(parameters, decay=0.999)
    fused = EMAModel(parameters, decay=0.999, foreach=True)
    source, target = (torch.ones(count, device=device) for _ in range(2))
    variants: dict[str, Callable[[], object]] = {
        "sm-train": ema.update,
        "EMAModel": lambda: reference.step(parameters),
        "EMAModel, foreach": lambda: fused.step(parameters),
        "one copy": lambda: target.copy_(source),
    }
    print(
        f"{device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"{count / 1e6:.0f} million weights in {len(parameters)} tensors"
    )
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 2):
        for name, variant in variants.items():
            _synchronize(device)
            started, cpu_started = time.perf_counter(), time.process_time()
            variant()
            _synchronize(device)
            if number > 1:  # the first two warm up
                seconds[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - cpu_started)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{'one update':<20}{'ms':>8}{'min':>8}{'max':>8}{'CPU ms':>9}")
    for name, values in seconds.items():
        print(
            f"{name:<20}{1e3 * median[name]:>8.1f}{1e3 * min(values):>8.1f}"
            f"{1e3 * max(values):>8.1f}{1e3 * statistics.median(cpu[name]):>9.1f}"
        )
    for name in ("EMAModel", "EMAModel, foreach"):
        print(
            f"{name} / sm-train: {ratio(seconds, name):.2f}×, in CPU time {ratio(cpu, name):.2f}×"
        )
    print(
        f"sm-train / 1.5 copies: {1 / (1.5 * ratio(seconds, 'one copy')):.2f}×, in CPU time "
        f"{1 / (1.5 * ratio(cpu, 'one copy')):.2f}×"
    )
    difference = max(
        float((average - expected).abs().max())
        for average, expected in zip(ema.averages, reference.shadow_params, strict=True)
    )
    print(f"largest difference from EMAModel: {difference:.1e}")


def ratio(measured: dict[str, list[float]], name: str) -> float:
    """Return the median of the ratios to sm-train within one round."""
    pairs = zip(measured[name], measured["sm-train"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
