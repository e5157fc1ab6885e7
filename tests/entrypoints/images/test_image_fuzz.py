"""Damaged images of every format cost only themselves, whatever they do to a decoder."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch
from sm_train.entrypoints.data_prep.packing.image_metadata import read_image_metadata
from sm_train.entrypoints.data_prep.packing.reencode import is_convertible, reencode
from sm_train.entrypoints.images.decoder_pool import DecoderPool
from sm_train.entrypoints.images.image_decoder import DecodeSpec, decode_with
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR

from tests.support.images.mutations import mutations, small_images

FUZZ_SECONDS = 300.0
EXACT = DecodeSpec(40, 48)
FAST = DecodeSpec(16, 24, crop="random", decode_mode="fast")

REASONS = {
    "decoder-crash",
    "decoder-timeout",
    "image-bomb",
    "image-corrupt",
    "image-empty",
    "image-hdr",
    "image-kind",
    "image-large",
    "image-memory",
    "image-mode",
}


def use_image(pool: DecoderPool, content: bytes) -> list[str]:
    """Do what packing and training do; return the reasons for which they skip the image."""
    reasons = []
    out = torch.empty((EXACT.height, EXACT.width, 3), dtype=torch.uint8)
    small = torch.empty((FAST.height, FAST.width, 3), dtype=torch.uint8)
    try:
        if is_convertible(content):
            content = pool.call(reencode, content, None, 90, DEFAULT_COLOR)
        pool.call(read_image_metadata, content, DEFAULT_COLOR)
    except DecodeError as error:
        reasons.append(error.reason)
    for spec, target in ((EXACT, out), (FAST, small)):
        try:
            decode_with(pool, spec, content, target, 1, 2, 3)
        except DecodeError as error:
            reasons.append(error.reason)
    return reasons


def fuzz(seed: int, files: int | None, seconds: float) -> Counter[str]:
    """Use mutated images until the time is over, or a number of them; count reasons."""
    pool = DecoderPool(2)
    seeds = small_images()
    found: Counter[str] = Counter()
    limit = time.monotonic() + seconds
    try:
        for content in seeds:
            assert use_image(pool, content) == []
        with ThreadPoolExecutor(2) as threads:
            contents = islice(mutations(seeds, seed), files)
            while (group := list(islice(contents, 50))) and time.monotonic() < limit:
                for reasons in threads.map(lambda content: use_image(pool, content), group):
                    found.update(reasons or ["used"])
        for content in seeds:
            assert use_image(pool, content) == []
    finally:
        pool.close()
    return found


def test_damaged_images_cost_only_themselves() -> None:
    found = fuzz(1, files=400, seconds=float("inf"))
    assert set(found) <= REASONS | {"used"}
    assert min(found["used"], found["image-corrupt"]) > 20


@pytest.mark.slow
def test_damaged_images_cost_only_themselves_for_ten_minutes() -> None:
    """``FUZZ_SEED`` selects other mutations than the default ones."""
    found = fuzz(int(os.environ.get("FUZZ_SEED", "2")), files=None, seconds=FUZZ_SECONDS)
    print(dict(found))
    assert set(found) <= REASONS | {"used"}
    assert found["decoder-timeout"] == 0
