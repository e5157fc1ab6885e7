"""Checks whether the CPUs of each stage decode as many images as its GPUs train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sm_train.cost.instances import instance_vcpus
from sm_train.entrypoints.shards.shard_index import IndexHeader
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.checks.shards import Shards

DECODING = Check("decoding", ("warning", "info"))

_BYTES_PER_PIXEL = 0.4
"""Of photographs as JPEG: 0.45 MB at 1,024 px (benchmarks/stream.py)."""

_READ_MS, _SCALE_MS = 4.7, 8.8
"""Milliseconds of a vCPU for a million stored pixels, and for a million pixels of a crop: a JPEG of
768 px takes 5.3 ms to 512 px and one of 12 million pixels 56 ms (benchmarks/loader.py and its
decoder at 4,000 × 3,000, November 2026)."""

_PROFILE_MS = {"RGB": 16.6, "gray": 6.8, "CMYK": 21.0}
"""What a profile adds for a million pixels of a crop, by the channels of the image
(benchmarks/color.py). RGB profiles with tables, of which an index does not know, take 50."""

_FREE_PROFILES = frozenset(("none", "sRGB"))


def decoding_findings(
    shards: Shards, document: dict[str, Any], config: RunConfig
) -> Iterator[Finding]:
    """Compare the images/s that an instance decodes with those that it trains on.

    ``document`` is that of ``cost --json``. Without an index, a speed or a known number of vCPUs
    nothing is said.
    """
    header = shards.header
    if header is None or not header.samples:
        return
    for index, stage in enumerate(document["stages"]):
        vcpus, speed = instance_vcpus(stage["instance_type"]), stage["steps_per_second"]
        if vcpus is None or speed is None or stage["resolution"] == shards.latents:
            continue
        gpus = int(stage["world_size"]) // int(stage["instances"])
        # Without decoders of its own, a GPU's process decodes in two threads.
        decoders = (config.training.decode_workers or 2) * gpus
        milliseconds = _milliseconds(header, stage["resolution"], config)
        possible = min(vcpus, decoders) * 1000 / milliseconds
        needed = float(speed) * stage["effective_batch_size"] / stage["instances"]
        found = (
            f"{stage['name']} trains on {needed:,.0f} images/s on each {stage['instance_type']}, "
            f"whose {decoders} decoders on {vcpus} vCPUs decode about {possible:,.0f} "
            f"({milliseconds:.1f} ms an image)"
        )
        if possible >= needed:
            fix = "if `sm-train review` shows waits for data, raise training.decode_workers"
            yield DECODING.found("info", f"stages[{index}]", found, fix)
        else:
            fix = _fix(vcpus, gpus, decoders, needed * milliseconds / 1000, stage["resolution"])
            yield DECODING.found("warning", f"stages[{index}]", found, fix)


def _fix(vcpus: int, gpus: int, decoders: int, cores: float, resolution: int) -> str:
    """Return what lets ``cores`` of work be done."""
    if decoders < cores <= vcpus:
        return f"set training.decode_workers to {-(-int(cores + 1) // gpus)}"
    return (
        f"pack the images with --max-side {2 * resolution}, which also converts their colors, or "
        "their latents with --latents"
    )


def _milliseconds(header: IndexHeader, resolution: int, config: RunConfig) -> float:
    """Return the milliseconds of a vCPU for an image, by the mean size and the colors of all."""
    stored = header.bytes / header.samples / _BYTES_PER_PIXEL / 1e6
    crop = resolution**2 / 1e6
    milliseconds = _READ_MS * stored + _SCALE_MS * crop
    known = sum(header.colors.values())
    if config.data.job_config().icc_profile == "srgb" and known:
        milliseconds += crop * sum(
            _profile_ms(code) * count / known for code, count in header.colors.items()
        )
    return milliseconds


def _profile_ms(code: str) -> float:
    """Return what the conversion of an image of these colors takes for a million pixels."""
    profile, channels, *_ = code.split("/")
    if profile in _FREE_PROFILES and channels != "CMYK":
        return 0.0
    return _PROFILE_MS[channels]
