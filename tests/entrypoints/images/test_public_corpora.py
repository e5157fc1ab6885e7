"""The test images of image libraries: what Pillow reads is packed, and has Pillow's pixels.

``public_corpora.json`` lists repositories and commits. Check them out as ``OWNER__NAME`` in the
folder that the environment variable ``IMAGE_CORPORA`` names.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sm_train.entrypoints.data_prep.packing.image_metadata import MAX_PIXELS, read_image_metadata
from sm_train.entrypoints.data_prep.packing.reencode import is_convertible, reencode
from sm_train.entrypoints.images.color import to_rgb
from sm_train.entrypoints.images.decoder_pool import DecoderPool
from sm_train.entrypoints.images.image_decoder import DecodeSpec, decode_with
from sm_train.entrypoints.images.image_header import DecodeError, read_header
from sm_train.entrypoints.images.stored_color import read_stored_color
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR

MANIFEST = Path(__file__).parents[2] / "support" / "images" / "public_corpora.json"
CORPORA: dict[str, str] = json.loads(MANIFEST.read_text())
SUFFIXES = {
    ".avif",
    ".bmp",
    ".gif",
    ".heic",
    ".heif",
    ".j2k",
    ".jp2",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".mpo",
    ".png",
    ".tif",
    ".tiff",
    ".webp",
}
SPEC = DecodeSpec(64, 64)
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    started = DecoderPool(2)
    yield started
    started.close()


def expected_pixels(content: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None:
    """Return what Pillow makes of a JPEG, PNG or WebP; None if it rejects the file."""
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP")) as image:
            if image.width * image.height > MAX_PIXELS:
                return None
            rgb = to_rgb(image, read_stored_color(content), DEFAULT_COLOR)
    except Exception:
        return None
    orientation = read_header(content).orientation
    upright = rgb.transpose(TURNS[orientation]) if orientation in TURNS else rgb
    side = min(upright.size)
    left, top = (upright.width - side) // 2, (upright.height - side) // 2
    square = upright.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((SPEC.width, SPEC.height), Image.Resampling.BILINEAR))


def check(pool: DecoderPool, content: bytes) -> str:
    """Return what became of a file: packed, converted, or the reason for which it is skipped."""
    outcome = "packed"
    expected = expected_pixels(content)
    try:
        if is_convertible(content):
            pool.call(
                read_image_metadata,
                pool.call(reencode, content, None, 90, DEFAULT_COLOR),
                DEFAULT_COLOR,
            )
            return "converted"
        metadata = pool.call(read_image_metadata, content, DEFAULT_COLOR)
    except DecodeError as error:
        if expected is None:
            return error.reason
        return f"refused although Pillow reads it: {error}"
    out = torch.empty((SPEC.height, SPEC.width, 3), dtype=torch.uint8)
    try:
        decode_with(pool, SPEC, content, out)
    except DecodeError as error:
        if error.reason == "image-mode":
            return error.reason
        return f"packed, but the loader refuses it: {error}"
    if expected is None:
        return "packed although Pillow refuses it"
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        sides = {(image.width, image.height), (image.height, image.width)}
    if (metadata.width, metadata.height) not in sides:
        return f"wrong sides: {metadata}"
    levels = np.abs(out.numpy().astype(int) - expected.astype(int))
    return outcome if levels.max() <= 2 else f"differs by {levels.max()} levels"


@pytest.mark.slow
@pytest.mark.parametrize("repository", CORPORA)
def test_corpus_is_packed_like_pillow_reads_it(pool: DecoderPool, repository: str) -> None:
    folder = Path(os.environ.get("IMAGE_CORPORA", "no folder"), repository.replace("/", "__"))
    if not folder.is_dir():
        pytest.skip(f"{repository} is not in the folder IMAGE_CORPORA")
    outcomes: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() in SUFFIXES and path.is_file():
                outcomes[str(path.relative_to(folder))] = check(pool, path.read_bytes())
    counts = Counter(outcomes.values())
    print(repository, dict(counts.most_common()))
    accepted = {"packed", "converted", "decoder-crash"} | {
        f"image-{kind}"
        for kind in ("bomb", "corrupt", "empty", "kind", "large", "memory", "mode", "too-large")
    }
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in accepted} == {}
