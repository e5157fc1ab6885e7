"""Latents of a batch are those of each sample alone, and the autoencoder encodes in fp32."""

from __future__ import annotations

import io
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import numpy as np
import pytest
import torch
from sm_train.entrypoints.data_prep.packing.latent_encoder import LatentEncoder
from sm_train.entrypoints.images.decoder_pool import InProcessDecoders
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR as SRGB
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.models.builder import build_components
from sm_train.entrypoints.models.components import encodes_in_fp32
from sm_train.entrypoints.models.model_folders import save_components

from tests.support.cluster.training_jobs import png, tiny_run
from tests.support.deadline import DEADLINE
from tests.support.models import record
from tests.support.run_documents import write_job_file

DECODERS = InProcessDecoders()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("components")
    run = tiny_run(max_steps=1, preset="tiny-sdxl")
    config = read_job_config(write_job_file(base, run), "8px")
    built = build_components(config.model, 8, components=None, previous=None)
    save_components(built, None, record(), base / "components")
    return base / "components"


def encode(encoder: LatentEncoder, number: int) -> dict[str, bytes]:
    return encoder.encode(png(number, side=12), f"a grey of {number}", DECODERS)


class CountingQueue(deque[Any]):
    """A queue that counts what was appended."""

    def __init__(self) -> None:
        super().__init__()
        self.appended = Semaphore(0)

    def append(self, item: Any) -> None:
        super().append(item)
        self.appended.release()


@pytest.mark.slow
def test_threads_encode_together_what_each_would_encode_alone(folder: Path) -> None:
    encoder = LatentEncoder(folder, 8, SRGB, batch_size=4)
    alone = [encode(encoder, number) for number in range(9)]
    encoder._waiting = waiting = CountingQueue()
    batches: list[int] = []
    started, queued = Event(), Event()
    encode_batch = encoder._encode_batch

    def counted(requests: Any) -> Any:
        # The first batch waits until all other samples are queued.
        started.set()
        assert queued.wait(DEADLINE)
        batches.append(len(requests))
        return encode_batch(requests)

    encoder._encode_batch = counted  # type: ignore[method-assign]
    with ThreadPoolExecutor(9) as pool:
        futures = [pool.submit(encode, encoder, 0)]
        assert started.wait(DEADLINE)
        futures += [pool.submit(encode, encoder, number) for number in range(1, 9)]
        assert all(waiting.appended.acquire(timeout=DEADLINE) for _ in range(9))
        queued.set()
        together = [future.result(DEADLINE) for future in futures]
    assert batches == [1, 4, 4]
    assert together == alone


def test_batches_equal_single_images_but_for_rounding(folder: Path) -> None:
    batched, single = (
        LatentEncoder(folder, 8, SRGB, batch_size=4),
        LatentEncoder(folder, 8, SRGB),
    )
    for name, content in encode(batched, 5).items():
        arrays = [np.load(io.BytesIO(encoded)) for encoded in (content, encode(single, 5)[name])]
        np.testing.assert_allclose(*arrays, rtol=2**-9, atol=1e-3)


def test_an_error_reaches_the_thread_of_each_sample(folder: Path) -> None:
    encoder = LatentEncoder(folder, 8, SRGB, batch_size=2)

    def fail(requests: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    encoder._encode_batch = fail  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        encode(encoder, 1)
    assert not encoder._waiting


@pytest.mark.parametrize(
    ("config", "precision", "vae_precision", "fp32"),
    [
        ({}, "bf16", "auto", True),
        ({"force_upcast": True}, "bf16", "auto", True),
        ({"force_upcast": False}, "bf16", "auto", False),
        ({"force_upcast": False}, "bf16", "fp32", True),
        ({}, "bf16", "bf16", False),
        ({"force_upcast": False}, "fp32", "auto", True),
    ],
)
def test_precision_is_as_force_upcast_says_unless_the_run_file_sets_it(
    config: dict[str, bool], precision: str, vae_precision: str, *, fp32: bool
) -> None:
    assert encodes_in_fp32(config, precision, vae_precision) == fp32
