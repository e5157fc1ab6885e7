"""The plan: shards of equal size, whatever the inputs; images that are there already."""

from __future__ import annotations

import io

import imagehash
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sm_train.entrypoints.data.image_header import DecodeError
from sm_train.entrypoints.packing.image_metadata import read_image_metadata, reencode
from sm_train.entrypoints.packing.perceptual_hash import near_duplicates
from sm_train.entrypoints.packing.plan import packed_bytes, plan_shards, shard_count

from tests.support.image_files import picture


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=300), st.data())
def test_shards_are_near_equal_and_hold_every_input_once(
    sizes: list[int], data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, len(sizes)))
    edges = plan_shards(sizes, shards)
    assert len(edges) == shards
    assert [edge[0] for edge in edges[1:]] == [edge[1] for edge in edges[:-1]]
    assert (edges[0][0], edges[-1][1]) == (0, len(sizes))
    assert all(first < behind for first, behind in edges)
    share = sum(sizes) / shards
    if max(sizes) <= share:
        for first, behind in edges:
            assert abs(sum(sizes[first:behind]) - share) <= max(sizes)


@given(st.integers(1, 10**15), st.integers(1000, 10**10), st.integers(1, 64))
def test_the_number_of_shards_divides_and_none_is_too_large(
    total: int, largest: int, instances: int
) -> None:
    count = shard_count(total, largest, multiple_of=instances)
    assert count % instances == 0
    assert total <= count * largest
    assert count == instances or (count - instances) * largest < total


def test_fewer_inputs_than_shards_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 inputs for 3 shards"):
        plan_shards([1, 1], 3)


def test_packed_bytes_are_headers_and_padding_too() -> None:
    assert packed_bytes(513, 1) == 3 * 512 + 1024 + 512 + 512


def photo(number: int, side: int = 400) -> Image.Image:
    rng = np.random.default_rng(number)
    small = rng.integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(small).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)  # type: ignore[arg-type]
    return content.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", pytest.param("PNG", marks=pytest.mark.slow), "WEBP"])
def test_hashes_agree_with_imagehash(kind: str) -> None:
    """On 99 of 100 within two bits of 64, though a JPEG is decoded at a fraction of its size."""
    far = 0
    for number in range(60):
        content = encoded(photo(number, 200 + 17 * number), kind)
        theirs = int(str(imagehash.phash(Image.open(io.BytesIO(content)))), 16)
        ours = read_image_metadata(content).phash
        assert ours is not None
        far += (ours ^ theirs).bit_count() > 2
    assert far == 0


def test_a_copy_that_was_scaled_and_compressed_is_near() -> None:
    for number in range(20):
        image = photo(number)
        one = read_image_metadata(encoded(image, quality=95)).phash
        other = read_image_metadata(encoded(image.resize((250, 190)), quality=40)).phash
        assert one is not None
        assert other is not None
        assert (one ^ other).bit_count() <= 6
        stranger = read_image_metadata(encoded(photo(number + 100))).phash
        assert stranger is not None
        assert (one ^ stranger).bit_count() > 10


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1) | st.none(), max_size=40), st.integers(0, 12), st.data())
def test_near_duplicates_are_those_that_comparing_all_finds(
    hashes: list[int | None], bits: int, data: st.DataObject
) -> None:
    for number in range(len(hashes)):
        if hashes[number] is not None and data.draw(st.booleans()):
            flips = data.draw(st.lists(st.integers(0, 63), max_size=bits + 2))
            copy = hashes[number] or 0
            for flip in flips:
                copy ^= 1 << flip
            hashes.append(copy)
    kept: list[int] = []
    expected = {}
    for number, one in enumerate(hashes):
        if one is None:
            continue
        like = [other for other in kept if (one ^ (hashes[other] or 0)).bit_count() <= bits]
        if like:
            expected[number] = like[0]
        else:
            kept.append(number)
    assert near_duplicates(hashes, bits) == expected


@pytest.mark.parametrize("orientation", range(1, 9))
def test_sides_are_those_that_are_shown(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    facts = read_image_metadata(encoded(photo(1, 120), exif=exif))
    turned = orientation >= 5
    assert (facts.width, facts.height) == ((90, 120) if turned else (120, 90))
    assert facts.orientation == orientation


def test_encoding_again_turns_upright_and_scales() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    again = reencode(encoded(photo(2, 400), exif=exif), 200, 90)
    facts = read_image_metadata(again)
    assert (facts.format, facts.width, facts.height, facts.orientation) == ("jpeg", 150, 200, 1)
    small = reencode(encoded(photo(2, 100), "PNG"), 200, 90)
    assert read_image_metadata(small).width == 100


def test_transparency_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    with Image.open(io.BytesIO(reencode(encoded(clear, "PNG"), None, 95))) as image:
        assert image.convert("RGB").getpixel((10, 10)) == (255, 255, 255)


@pytest.mark.parametrize("length", [0, 1, 3, 20, 200, 400, -1])
def test_every_cut_is_found(length: int) -> None:
    content = picture(size=(300, 200))
    with pytest.raises(DecodeError, match="image-"):
        read_image_metadata(content[: length if length >= 0 else len(content) // 2])


def test_cmyk_and_grey_jpegs_are_whole() -> None:
    for mode in ("CMYK", "L"):
        facts = read_image_metadata(encoded(Image.new(mode, (64, 48), 9), "JPEG"))
        assert (facts.format, facts.width, facts.height) == ("jpeg", 64, 48)
        assert facts.phash is not None


def test_headers_alone_leave_pixels_alone() -> None:
    content = picture(size=(300, 200))
    facts = read_image_metadata(content[: len(content) // 2], pixels=False)
    assert (facts.width, facts.height, facts.phash) == (300, 200, None)
