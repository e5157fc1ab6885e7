"""Planning shards of equal size; image metadata, re-encoding and near-duplicates."""

from __future__ import annotations

import io
from itertools import pairwise

import imagehash
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sm_train.entrypoints.data_prep.packing.image_metadata import read_image_metadata
from sm_train.entrypoints.data_prep.packing.plan import packed_bytes, plan_shards, shard_count
from sm_train.entrypoints.data_prep.packing.reencode import reencode
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR as SRGB

from tests.support.image_files import image_bytes


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=300), st.integers(1, 50), st.data())
def test_shards_have_near_equal_sizes_and_contain_all_inputs(
    sizes: list[int], part: int, data: st.DataObject
) -> None:
    """However many sizes are read at a time."""
    shards = data.draw(st.integers(1, len(sizes)))
    parts = [np.array(sizes[first : first + part]) for first in range(0, len(sizes), part)]
    counts = plan_shards(parts, sum(sizes), shards)
    assert counts == plan_shards([np.array(sizes)], sum(sizes), shards)
    assert (len(counts), sum(counts)) == (shards, len(sizes))
    assert min(counts) > 0
    mean = sum(sizes) / shards
    if max(sizes) <= mean:
        for start, stop in pairwise([0, *np.cumsum(counts).tolist()]):
            assert abs(sum(sizes[start:stop]) - mean) <= max(sizes)


@given(st.integers(1, 10**15), st.integers(1000, 10**10), st.integers(1, 64))
def test_the_shard_count_is_the_smallest_multiple_within_the_size_limit(
    total: int, max_bytes: int, instances: int
) -> None:
    count = shard_count(total, max_bytes, multiple_of=instances)
    assert count % instances == 0
    assert total <= count * max_bytes
    assert count == instances or (count - instances) * max_bytes < total


def test_fewer_inputs_than_shards_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 inputs for 3 shards"):
        plan_shards([np.array([1, 1])], 2, 3)


def test_packed_bytes_include_headers_and_padding() -> None:
    assert packed_bytes(513, 1, 0) == 3 * 512 + 1024 + 512 + 512
    assert packed_bytes(513, 1, 513) == 3 * 512 + 1024 + 512 + 1536


def photo(number: int, side: int = 400) -> Image.Image:
    rng = np.random.default_rng(number)
    small = rng.integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(small).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)  # type: ignore[arg-type]
    return content.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["JPEG", pytest.param("PNG", marks=pytest.mark.slow), "WEBP"])
def test_hashes_agree_with_imagehash(kind: str) -> None:
    """Within two of 64 bits, although JPEGs are decoded at a fraction of their size."""
    disagreements = 0
    for number in range(60):
        content = encoded(photo(number, 200 + 17 * number), kind)
        reference = int(str(imagehash.phash(Image.open(io.BytesIO(content)))), 16)
        phash = read_image_metadata(content, SRGB).phash
        assert phash is not None
        disagreements += (phash ^ reference).bit_count() > 2
    assert disagreements == 0


def test_a_scaled_and_compressed_copy_has_a_similar_hash() -> None:
    for number in range(20):
        image = photo(number)
        original = read_image_metadata(encoded(image, quality=95), SRGB).phash
        copy = read_image_metadata(encoded(image.resize((250, 190)), quality=40), SRGB).phash
        assert original is not None
        assert copy is not None
        assert (original ^ copy).bit_count() <= 6
        unrelated = read_image_metadata(encoded(photo(number + 100)), SRGB).phash
        assert unrelated is not None
        assert (original ^ unrelated).bit_count() > 10


@pytest.mark.parametrize("orientation", range(1, 9))
def test_dimensions_respect_the_exif_orientation(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    metadata = read_image_metadata(encoded(photo(1, 120), exif=exif), SRGB)
    rotated = orientation >= 5
    assert (metadata.width, metadata.height) == ((90, 120) if rotated else (120, 90))
    assert metadata.orientation == orientation


def test_reencoding_applies_the_orientation_and_scales() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    reencoded = reencode(encoded(photo(2, 400), exif=exif), 200, 90, SRGB)
    metadata = read_image_metadata(reencoded, SRGB)
    assert (metadata.format, metadata.width, metadata.height, metadata.orientation) == (
        "jpeg",
        150,
        200,
        1,
    )
    small = reencode(encoded(photo(2, 100), "PNG"), 200, 90, SRGB)
    assert read_image_metadata(small, SRGB).width == 100


def test_transparent_images_get_a_white_background() -> None:
    transparent = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    with Image.open(io.BytesIO(reencode(encoded(transparent, "PNG"), None, 95, SRGB))) as image:
        assert image.convert("RGB").getpixel((10, 10)) == (255, 255, 255)


@pytest.mark.parametrize("length", [0, 1, 3, 20, 200, 400, -1])
def test_truncated_images_are_detected(length: int) -> None:
    content = image_bytes(size=(300, 200))
    with pytest.raises(DecodeError, match="image-"):
        read_image_metadata(content[: length if length >= 0 else len(content) // 2], SRGB)


def test_cmyk_and_grey_jpegs_are_accepted() -> None:
    for mode in ("CMYK", "L"):
        metadata = read_image_metadata(encoded(Image.new(mode, (64, 48), 9), "JPEG"), SRGB)
        assert (metadata.format, metadata.width, metadata.height) == ("jpeg", 64, 48)
        assert metadata.phash is not None


def test_without_pixels_only_the_header_is_read() -> None:
    content = image_bytes(size=(300, 200))
    metadata = read_image_metadata(content[: len(content) // 2], SRGB, pixels=False)
    assert (metadata.width, metadata.height, metadata.phash) == (300, 200, None)
