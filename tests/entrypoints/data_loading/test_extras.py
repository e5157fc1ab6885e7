"""Extra files of a sample as tensors: they follow the image, and damage is a bad sample."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.data_loading.loader import open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.data_loading.webdataset_reader import list_stream
from sm_train.entrypoints.images.decoder_pool import InProcessDecoders
from sm_train.entrypoints.images.extra_decoder import decode_extra
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.job_interface.job_config import ExtraConfig

from tests.support.cluster.training_jobs import write_shard
from tests.support.data_channels import DATA_CONFIG, rest_of_epoch, take_batches

HEIGHT, WIDTH, SAMPLES = 16, 48, 8
MASK = ExtraConfig("mask", "mask.png", "mask", ())
DEPTH = ExtraConfig("depth", "depth.npy", "map", ())
CLIP = ExtraConfig("clip", "clip.npy", "array", (3,))
SECOND = ExtraConfig("second", "second.png", "image", ())
CONFIG = replace(
    DATA_CONFIG,
    crop="random",
    flip=True,
    decode="exact",
    max_bad_fraction=1.0,
    extras=(MASK, DEPTH, CLIP, SECOND),
)


def npy(array: NDArray[Any]) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def png_of(array: NDArray[Any], orientation: int = 1) -> bytes:
    content, image = io.BytesIO(), Image.fromarray(array)
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(content, "PNG", exif=exif)
    return content.getvalue()


def files(number: int) -> dict[str, bytes]:
    """Return a sample whose image, mask, depth and second image show the column's number."""
    columns = np.tile(np.arange(WIDTH, dtype=np.uint8) * 5, (HEIGHT, 1))
    image = np.stack([columns] * 3, axis=2)
    return {
        "png": png_of(image),
        "txt": b"text",
        "mask.png": png_of(columns),
        # Of half the size.
        "depth.npy": npy(columns[::2, ::2].astype(np.float32) / 100 + 0.025),
        "clip.npy": npy(np.array([number, 0, 1], np.float16)),
        "second.png": png_of(255 - image),
    }


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    folder = tmp_path / "channel"
    folder.mkdir()
    write_shard(folder / "0.tar", {f"{number}": files(number) for number in range(SAMPLES)})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["indexed", "webdataset"])
@pytest.mark.parametrize("workers", [0, 1])
def test_extras_have_the_crop_and_flip_of_their_image(
    channel: Path, tmp_path: Path, reader: str, workers: int
) -> None:
    rank, decode = DataRank(("algo-1",), 0, 0, 1), lambda value: [value]
    config = replace(CONFIG, reader=reader, epoch_samples=SAMPLES, shuffle_buffer=2)
    if reader == "indexed":
        shards: Any = build_catalog(channel, None, rank, decode, tmp_path / "scan")
    else:
        shards = list_stream(channel, rank, decode)
    loader = open_loader(
        shards, rank, config, resolution=16, batch_size=4, seed=1, decode_workers=workers
    )
    batches = take_batches(loader, 4)
    seen = {check_sample(batch, row) for batch in batches for row in range(4)}
    assert {flipped for _, flipped in seen} == {False, True}
    assert len({left for left, _ in seen}) > 3


def check_sample(batch: Batch, row: int) -> tuple[float, bool]:
    """Compare the extras with the image; return its left edge, and whether it is flipped."""
    assert not batch.bad_samples
    shapes = {name: (tuple(array.shape), array.dtype) for name, array in batch.extras.items()}
    assert shapes == {
        "mask": ((4, 16, 16), torch.uint8),
        "depth": ((4, 16, 16), torch.float32),
        "clip": ((4, 3), torch.float32),
        "second": ((4, 16, 16, 3), torch.uint8),
    }
    pixels = batch.pixels[row, :, :, 0]
    assert torch.equal(batch.extras["mask"][row], pixels)
    assert torch.equal(batch.extras["second"][row], 255 - batch.pixels[row])
    depth = batch.extras["depth"][row, :, 2:-2] * 100
    assert (depth - pixels[:, 2:-2].float()).abs().max() <= 6  # a column of the half size
    assert batch.extras["clip"][row].tolist()[1:] == [0.0, 1.0]
    return float(pixels[0, 0]), bool(pixels[0, 0] > pixels[0, -1])


def test_a_sample_with_an_unusable_extra_is_a_bad_one(channel: Path, tmp_path: Path) -> None:
    samples = {f"{number}": files(number) for number in range(SAMPLES)}
    del samples["0"]["clip.npy"]
    samples["1"]["clip.npy"] = npy(np.zeros(4))
    samples["2"]["depth.npy"] = b"\x93NUMPY"
    samples["3"]["mask.png"] = png_of(np.zeros((16, 16), np.uint8))
    samples["4"]["second.png"] = b"none"
    write_shard(channel / "0.tar", samples)
    rank = DataRank(("algo-1",), 0, 0, 1)
    catalog = build_catalog(channel, None, rank, lambda value: [value], tmp_path / "scan")
    loader = open_loader(
        catalog, rank, CONFIG, resolution=16, batch_size=4, seed=1, decode_workers=0
    )
    bad = {
        sample.key: sample.reason for batch in rest_of_epoch(loader) for sample in batch.bad_samples
    }
    assert bad == {
        "0": "extra-missing",
        "1": "extra-shape",
        "2": "extra-corrupt",
        "3": "extra-shape",
        "4": "image-corrupt",
    }


def test_stored_values_are_kept() -> None:
    levels = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 80
    image = png_of(np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    spec = DecodeSpec(HEIGHT, WIDTH)

    def decoded(extra: ExtraConfig, content: bytes) -> torch.Tensor:
        out = torch.empty((HEIGHT, WIDTH), dtype=torch.uint8 if extra is MASK else torch.float32)
        decode_extra(InProcessDecoders(), extra, content, image, spec, out, flipped=False)
        return out

    depth = replace(DEPTH, member="depth.png")
    assert decoded(depth, png_of(levels)).tolist() == levels.tolist()
    turned = png_of(np.ascontiguousarray(levels[::-1, ::-1]), orientation=3)
    assert decoded(depth, turned).tolist() == levels.tolist()
    # The indices of a palette are the classes of a segmentation.
    classes = Image.fromarray((levels % 7).astype(np.uint8), "P")
    classes.putpalette([255, 0, 0] * 7)
    content = io.BytesIO()
    classes.save(content, "PNG")
    assert decoded(MASK, content.getvalue()).tolist() == (levels % 7).tolist()
    with pytest.raises(DecodeError, match="values outside 0 to 255"):
        decoded(MASK, png_of(levels))
