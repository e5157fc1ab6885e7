"""Pictures of every kind: right to a level or two, or refused with a reason; none breaks a job."""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps
from sm_train.entrypoints.data import image_decoder
from sm_train.entrypoints.data.image_decoder import DecodeSpec
from sm_train.entrypoints.data.image_header import DecodeError, image_size


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some detail, as a camera sees them."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8)
    base = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    grain = rng.normal(0, 3, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(base) + grain, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def decoded(content: bytes, target: DecodeSpec, *key: int) -> np.ndarray[Any, Any]:
    out = torch.full((target.height, target.width, 3), 77, dtype=torch.uint8)
    target.decode(content, out, *key)
    return out.numpy()


def by_pillow(content: bytes, side: int, mode: str) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(content)) as image:
        rgb = ImageOps.exif_transpose(image).convert("RGB")
    short = min(rgb.size)
    left, top = (rgb.width - short) // 2, (rgb.height - short) // 2
    square = rgb.crop((left, top, left + short, top + short))
    return np.asarray(square.resize((side, side), getattr(Image.Resampling, mode.upper())))


def difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> tuple[int, float]:
    levels = np.abs(one.astype(int) - other.astype(int))
    return int(levels.max()), float(levels.mean())


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(40, 150),
    width=st.integers(40, 150),
    mode=st.sampled_from(["bilinear", "bicubic"]),
    kind=st.sampled_from(["JPEG", "PNG", "WEBP"]),
    side=st.integers(76, 160),
)
def test_scaling_agrees_with_pillow(
    height: int, width: int, mode: Any, kind: str, side: int
) -> None:
    """Above half of the size, where no decoder scales: to two levels."""
    content = encoded(photo(height, width), kind)
    ours = decoded(content, DecodeSpec(side, side, mode=mode))
    most, mean = difference(ours, by_pillow(content, side, mode))
    assert most <= 2
    assert mean < 0.5


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_reduced_decode_stays_near_the_whole_one(factor: int) -> None:
    """libjpeg averages blocks where Pillow weighs neighbours: a level on average."""
    content = encoded(photo(64 * factor, 64 * factor), "JPEG", quality=90)
    ours = decoded(content, DecodeSpec(64, 64, mode="bilinear"))
    with Image.open(io.BytesIO(content)) as image:
        image.draft("RGB", (64, 64))
        assert difference(ours, np.asarray(image.convert("RGB")))[0] <= 1
    assert difference(ours, by_pillow(content, 64, "bilinear"))[1] < 2


def test_no_more_is_decoded_than_the_target_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer with room for an eighth of the image, and for nothing more, suffices."""
    content = encoded(photo(1600, 2400), "JPEG")
    room = np.empty(3 * 200 * 300, np.uint8)
    monkeypatch.setattr(image_decoder, "_buffer", lambda size: room[:size])
    assert decoded(content, DecodeSpec(200, 200)).std() > 1
    with pytest.raises(DecodeError):
        decoded(content[: len(content) // 2], DecodeSpec(200, 200))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(photo(80, 80, seed=3), kind, exif=exif)
    ours = decoded(content, DecodeSpec(64, 64))
    assert difference(ours, by_pillow(content, 64, "bicubic"))[0] <= 3


def test_a_turned_picture_is_cut_as_it_is_seen() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(photo(60, 120), "JPEG", exif=exif)
    assert image_size(content) == (120, 60)
    ours = decoded(content, DecodeSpec(120, 60, mode="bilinear"))
    with Image.open(io.BytesIO(content)) as image:
        upright = np.asarray(ImageOps.exif_transpose(image))
    assert difference(ours, upright)[0] <= 1


def grey16() -> Image.Image:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    return Image.fromarray(ramp)


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (photo(64, 64).convert("L"), "JPEG"),
        (photo(64, 64).convert("CMYK"), "JPEG"),
        (photo(64, 64).convert("L"), "PNG"),
        (photo(64, 64).convert("1"), "PNG"),
        (photo(64, 64).convert("P"), "PNG"),
        (photo(64, 64), "WEBP"),
    ],
)
def test_every_mode_becomes_rgb_as_pillow_has_it(image: Image.Image, kind: str) -> None:
    content = encoded(image, kind)
    ours = decoded(content, DecodeSpec(64, 64))
    assert difference(ours, by_pillow(content, 64, "bicubic"))[0] <= 1


def test_sixteen_bits_become_the_upper_eight() -> None:
    ours = decoded(encoded(grey16(), "PNG"), DecodeSpec(64, 64))
    assert difference(ours[..., 0], np.asarray(grey16()) >> 8)[0] == 0
    assert ours.max() == 255
    assert len(np.unique(ours)) == 256


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (16, 16), (200, 0, 0, 0))
    content = encoded(image.convert(mode), "PNG")
    assert decoded(content, DecodeSpec(16, 16)).min() == 255


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_cut_short_is_refused(kind: str) -> None:
    content = encoded(photo(90, 90), kind)
    for part in (4, 2, 1.2):
        with pytest.raises(DecodeError) as caught:
            decoded(content[: int(len(content) / part)], DecodeSpec(32, 32))
        assert caught.value.reason == "image-corrupt"


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["JPEG", "PNG", "WEBP"]),
    place=st.floats(0, 1, exclude_max=True),
    noise=st.binary(min_size=1, max_size=40),
)
def test_damage_is_refused_or_survived(kind: str, place: float, noise: bytes) -> None:
    content = encoded(photo(48, 48), kind)
    start = int(len(content) * place)
    damaged = content[:start] + noise + content[start + len(noise) :]
    with suppress(DecodeError):
        decoded(damaged, DecodeSpec(16, 16))
    with suppress(DecodeError):
        image_size(damaged)


@given(content=st.binary(max_size=200))
def test_no_bytes_break_the_decoder(content: bytes) -> None:
    for begin in (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"):
        with pytest.raises(DecodeError):
            decoded(begin + content, DecodeSpec(8, 8))


def test_a_jpeg_with_bytes_behind_its_end_is_an_image() -> None:
    """Telephones append films and further pictures; libjpeg-turbo minds only what it reads."""
    content = encoded(photo(40, 40), "JPEG")
    whole = decoded(content, DecodeSpec(40, 40))
    assert np.array_equal(decoded(content + bytes(5000) + content, DecodeSpec(40, 40)), whole)


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)


def test_a_picture_that_breaks_its_decoder_is_refused() -> None:
    """Pillow raises SyntaxError, which is no ValueError, for a PNG with a nameless chunk."""
    rows = zlib.compress(bytes(8 * (1 + 24)))
    broken = png_header(8, 8) + chunk(b"IDAT", rows[:5])
    broken += chunk(bytes(4), rows[5:]) + chunk(b"IEND", b"")
    with pytest.raises(SyntaxError), Image.open(io.BytesIO(broken)) as image:
        image.load()
    with pytest.raises(DecodeError, match="image-corrupt"):
        decoded(broken, DecodeSpec(8, 8))


@pytest.mark.parametrize("side", [12_000, 40_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_unread(side: int) -> None:
    """A few bytes that promise gigabytes: no row of them is asked for."""
    bomb = png_header(side, side) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    with pytest.raises(DecodeError, match="image-bomb"):
        decoded(bomb, DecodeSpec(8, 8))
    jpeg = bytearray(encoded(photo(16, 16), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    with pytest.raises(DecodeError, match="image-bomb"):
        decoded(bytes(jpeg), DecodeSpec(8, 8))


def test_a_hundred_megapixels_are_decoded_at_an_eighth() -> None:
    """In a buffer of 4.7 MB, not of 300: the memory of a large picture is bounded."""
    content = encoded(Image.new("RGB", (10_000, 10_000), (10, 200, 90)), "JPEG")
    ours = decoded(content, DecodeSpec(512, 512))
    assert np.abs(ours.reshape(-1, 3).astype(int) - [10, 200, 90]).max() <= 2
    held = image_decoder._buffers.content
    assert held is None or held.nbytes <= 3 * image_decoder.LARGE_PIXELS


def test_a_colour_profile_does_not_hinder() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    content = encoded(photo(40, 40), "JPEG", icc_profile=profile)
    assert (
        difference(decoded(content, DecodeSpec(40, 40)), by_pillow(content, 40, "bicubic"))[0] <= 1
    )


@settings(max_examples=30, deadline=None)
@given(height=st.integers(9, 90), width=st.integers(9, 90), key=st.integers(0, 2**40))
def test_a_random_cut_is_a_function_of_its_key(height: int, width: int, key: int) -> None:
    content = encoded(photo(height, width), "PNG")
    target = DecodeSpec(8, 8, crop="random", seed=5)
    first = decoded(content, target, 1, key)
    assert np.array_equal(decoded(content, target, 1, key), first)


def test_random_cuts_reach_both_ends() -> None:
    wide = np.zeros((8, 80, 3), np.uint8)
    wide[:, :, 0] = np.arange(80) * 3
    content = encoded(Image.fromarray(wide), "PNG")
    target = DecodeSpec(8, 8, crop="random")
    starts = {int(decoded(content, target, 0, key)[0, 0, 0]) // 3 for key in range(600)}
    assert min(starts) == 0
    assert max(starts) >= 71
    assert len(starts) > 60
    assert int(decoded(content, DecodeSpec(8, 8))[0, 0, 0]) // 3 == 36


@pytest.mark.parametrize(("height", "width"), [(32, 64), (64, 32), (48, 48)])
def test_a_target_need_not_be_square(height: int, width: int) -> None:
    content = encoded(photo(120, 120), "JPEG")
    ours = decoded(content, DecodeSpec(height, width, mode="bilinear"))
    with Image.open(io.BytesIO(content)) as image:
        rgb = image.convert("RGB")
    cut_height, cut_width = min(120, 120 * height // width), min(120, 120 * width // height)
    left, top = (120 - cut_width) // 2, (120 - cut_height) // 2
    theirs = rgb.crop((left, top, left + cut_width, top + cut_height)).resize((width, height), 2)
    assert difference(ours, np.asarray(theirs))[1] < 1.5


def test_sizes_are_read_from_the_header_alone() -> None:
    for kind in ("JPEG", "PNG"):
        content = encoded(photo(40, 70), kind)
        assert image_size(content[: max(700, len(content) // 3)]) == (40, 70)
    assert image_size(encoded(photo(40, 70), "WEBP")) == (40, 70)
    with pytest.raises(DecodeError):
        image_size(b"no picture")
