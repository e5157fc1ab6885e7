"""The image decoder: right to a level or two for every format, or a reason; nothing crashes."""

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
from sm_train.entrypoints.data_prep.packing.image_metadata import read_image_metadata
from sm_train.entrypoints.data_prep.packing.reencode import reencode
from sm_train.entrypoints.images import image_decoder
from sm_train.entrypoints.images.color import to_rgb
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.images.image_header import DecodeError, exif_orientation, image_size
from sm_train.entrypoints.images.stored_color import StoredColor
from sm_train.entrypoints.job_interface.job_config import UNRECORDED_COLOR as STORED

from tests.support.images.lossless_jpeg import lossless_jpeg


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return smooth colors with grain, as from a camera."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8)
    base = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    grain = rng.normal(0, 3, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(base) + grain, 0, 255).astype(np.uint8))


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, image_format, **options)
    return content.getvalue()


def decode(content: bytes, spec: DecodeSpec, *key: int) -> np.ndarray[Any, Any]:
    out = torch.full((spec.height, spec.width, 3), 77, dtype=torch.uint8)
    spec.decode(content, out, *key)
    return out.numpy()


def decode_with_pillow(content: bytes, side: int) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(content)) as image:
        rgb = ImageOps.exif_transpose(image).convert("RGB")
    short = min(rgb.size)
    left, top = (rgb.width - short) // 2, (rgb.height - short) // 2
    square = rgb.crop((left, top, left + short, top + short))
    return np.asarray(square.resize((side, side), Image.Resampling.BICUBIC))


def difference(image: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> tuple[int, float]:
    """Return the largest and the mean difference in levels."""
    levels = np.abs(image.astype(int) - other.astype(int))
    return int(levels.max()), float(levels.mean())


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(40, 150),
    width=st.integers(40, 150),
    image_format=st.sampled_from(["JPEG", "PNG", "WEBP"]),
    side=st.integers(76, 160),
)
def test_scaling_agrees_with_pillow(height: int, width: int, image_format: str, side: int) -> None:
    """Above half of its size no decoder scales, so both agree to two levels."""
    content = encode(photo(height, width), image_format)
    pixels = decode(content, DecodeSpec(side, side))
    most, mean = difference(pixels, decode_with_pillow(content, side))
    assert most <= 2
    assert mean < 0.5


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_fast_mode_reduces_a_jpeg_that_covers_twice_the_target(factor: int) -> None:
    """libjpeg averages blocks, Pillow weighs neighbors: they differ by a level on average."""
    content = encode(photo(64 * factor, 64 * factor), "JPEG", quality=90)
    pixels = decode(content, DecodeSpec(32, 32, decode_mode="fast"))
    with Image.open(io.BytesIO(content)) as image:
        image.draft("RGB", (64, 64))
        reduced = image.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC)
    assert difference(pixels, np.asarray(reduced))[0] <= 1
    expected = decode_with_pillow(content, 32)
    assert difference(pixels, expected)[1] < 2
    exact = decode(content, DecodeSpec(32, 32))
    assert difference(exact, expected)[0] <= 2


def test_fast_mode_does_not_reduce_a_jpeg_that_covers_less() -> None:
    content = encode(photo(127, 127), "JPEG")
    fast, exact = (
        decode(content, DecodeSpec(64, 64, decode_mode=mode)) for mode in ("fast", "exact")
    )
    assert np.array_equal(fast, exact)


@pytest.mark.parametrize(("height", "width"), [(150, 401), (401, 150), (333, 211), (97, 98)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exact_mode_agrees_with_pillow_on_upright_images_of_odd_sides(
    height: int, width: int, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(photo(height, width), "JPEG", exif=exif, quality=90)
    for side in (96, 33):
        pixels = decode(content, DecodeSpec(side, side))
        assert difference(pixels, decode_with_pillow(content, side))[0] <= 2


@pytest.mark.parametrize("left", [0, 1, 3, 5])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_fast_mode_crops_at_the_same_place_as_exact_mode(left: int, orientation: int) -> None:
    """A disc in the middle stays in the middle: rounding to reduced pixels would move it."""
    height, width = 800, 1000 + 2 * left
    y, x = np.mgrid[:height, :width]
    disc = np.hypot(y - (height - 1) / 2, x - (width - 1) / 2) < 200
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.repeat(disc[..., None], 3, axis=2).astype(np.uint8) * 255
    content = encode(Image.fromarray(pixels), "JPEG", exif=exif, quality=95)
    spec = DecodeSpec(100, 100, decode_mode="fast")
    shown = decode(content, spec)[..., 0].astype(float)
    centers = [(shown.sum(1 - axis) * np.arange(100)).sum() / shown.sum() for axis in (0, 1)]
    assert centers == pytest.approx([49.5, 49.5], abs=0.02)


@pytest.mark.parametrize("channels", [1, 3])
def test_lossless_jpeg_is_decoded_at_its_full_size(channels: int) -> None:
    """libjpeg-turbo 3.1.2 would write all of it into a buffer for an eighth of its size."""
    pixels = np.asarray(photo(640, 640))[..., :channels].squeeze()
    content = lossless_jpeg(np.ascontiguousarray(pixels))
    expected = Image.fromarray(pixels).convert("RGB")
    assert difference(decode(content, DecodeSpec(640, 640)), np.asarray(expected)) == (0, 0)
    small = expected.resize((64, 64), Image.Resampling.BICUBIC)
    assert difference(decode(content, DecodeSpec(64, 64)), np.asarray(small))[0] <= 2


def test_lossless_jpeg_has_metadata() -> None:
    pixels = np.asarray(photo(640, 700).convert("L"))
    metadata = read_image_metadata(lossless_jpeg(pixels), STORED)
    reference = read_image_metadata(encode(Image.fromarray(pixels), "PNG"), STORED)
    assert (metadata.format, metadata.height, metadata.width) == ("jpeg", 640, 700)
    assert metadata.phash is not None
    assert reference.phash is not None
    assert (metadata.phash ^ reference.phash).bit_count() <= 2


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_applied(orientation: int, image_format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(photo(80, 80, seed=3), image_format, exif=exif)
    pixels = decode(content, DecodeSpec(64, 64))
    assert difference(pixels, decode_with_pillow(content, 64))[0] <= 3


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "form"), [(3, "HH"), (4, "I"), (1, "BBH"), (2, "4s"), (3, "hH")])
def test_orientation_of_any_integer_type_is_read(order: str, kind: int, form: str) -> None:
    value = (b"6\0\0\0",) if form == "4s" else (6, 0, 0)[: len(form)]
    entry = struct.pack(order + "HHI" + form, 0x0112, kind, 1, *value)
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "I", 8)
    block = head + struct.pack(order + "H", 1) + entry
    expected = 1 if form == "4s" else 6
    assert exif_orientation(block) == expected
    assert exif_orientation(b"Exif\0\0" + block) == expected


@given(block=st.binary(max_size=60), prefix=st.sampled_from([b"", b"II*\0", b"MM\0*", b"Exif\0\0"]))
def test_any_exif_block_has_an_orientation(block: bytes, prefix: bytes) -> None:
    assert exif_orientation(prefix + block) in range(1, 9)


@pytest.mark.parametrize("after_pixels", [False, True])
def test_png_orientation_counts_wherever_it_is(after_pixels: bool) -> None:
    """Packing and loading agree, and a damaged block is no orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encode(photo(40, 60), "PNG")
    for block, size in ((exif.tobytes()[6:], (60, 40)), (b"garbage", (40, 60))):
        at = len(plain) - 12 if after_pixels else 33
        content = plain[:at] + png_chunk(b"eXIf", block) + plain[at:]
        assert image_size(content) == size
        metadata = read_image_metadata(content, STORED)
        assert (metadata.height, metadata.width) == size
        pixels = decode(content, DecodeSpec(*size))
        upright = (
            photo(40, 60) if size[0] == 40 else photo(40, 60).transpose(Image.Transpose.ROTATE_270)
        )
        assert difference(pixels, np.asarray(upright)) == (0, 0)


def test_unusual_jpegs_are_read_as_pillow_reads_them() -> None:
    """Bytes between segments, fill bytes, and chroma at a quarter of the width (4:1:0)."""
    plain = encode(photo(64, 96), "JPEG")
    expected = decode(plain, DecodeSpec(64, 96))
    frame = plain.index(b"\xff\xc0")
    for between in (b"\xff\xff", bytes(3), b"abc"):
        content = plain[:frame] + between + plain[frame:]
        assert np.array_equal(decode(content, DecodeSpec(64, 96)), expected)
        assert read_image_metadata(content, STORED).width == 96
    sampled = bytearray(encode(photo(64, 96), "JPEG", subsampling=2))
    frame = sampled.index(b"\xff\xc0")
    assert sampled[frame + 11] == 0x22
    sampled[frame + 11] = 0x42  # luminance four times as wide as chrominance, and twice as high
    content = bytes(sampled)
    with Image.open(io.BytesIO(content)) as image:
        reference = np.asarray(image.convert("RGB"))
    assert difference(decode(content, DecodeSpec(64, 96)), reference)[0] <= 2
    assert read_image_metadata(content, STORED).width == 96


def test_rotated_image_is_cropped_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encode(photo(60, 120), "JPEG", exif=exif)
    assert image_size(content) == (120, 60)
    pixels = decode(content, DecodeSpec(120, 60))
    with Image.open(io.BytesIO(content)) as image:
        upright = np.asarray(ImageOps.exif_transpose(image))
    assert difference(pixels, upright)[0] <= 1


def gray16() -> Image.Image:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    return Image.fromarray(ramp)


@pytest.mark.parametrize(
    ("image", "image_format"),
    [
        (photo(64, 64).convert("L"), "JPEG"),
        (photo(64, 64).convert("CMYK"), "JPEG"),
        (photo(64, 64).convert("L"), "PNG"),
        (photo(64, 64).convert("1"), "PNG"),
        (photo(64, 64).convert("P"), "PNG"),
        (photo(64, 64), "WEBP"),
    ],
)
def test_every_mode_is_converted_to_rgb_like_pillow(image: Image.Image, image_format: str) -> None:
    content = encode(image, image_format)
    pixels = decode(content, DecodeSpec(64, 64))
    assert difference(pixels, decode_with_pillow(content, 64))[0] <= 1


def test_sixteen_bit_images_keep_the_upper_eight_bits() -> None:
    pixels = decode(encode(gray16(), "PNG"), DecodeSpec(64, 64))
    assert difference(pixels[..., 0], np.asarray(gray16()) >> 8)[0] == 0
    assert pixels.max() == 255
    assert len(np.unique(pixels)) == 256


def test_transparent_level_of_a_16_bit_png_is_white() -> None:
    """A gray image may name one of its levels; of 16 bits, Pillow drops it in conversions."""
    levels = np.tile(np.array([0, 512, 65535], np.uint16), (3, 1))
    content = encode(Image.fromarray(levels), "PNG")
    # The chunk that names the level follows IHDR: 8 bytes of signature, 25 of the header.
    chunk = b"tRNS" + struct.pack(">H", 512)
    trns = struct.pack(">I", 2) + chunk + struct.pack(">I", zlib.crc32(chunk))
    pixels = decode(content[:33] + trns + content[33:], DecodeSpec(3, 3))
    assert pixels[0, :, 0].tolist() == [0, 255, 255]
    assert decode(content, DecodeSpec(3, 3))[0, :, 0].tolist() == [0, 2, 255]


def gray_tiff(levels: list[int], bits: int, white_is_zero: bool) -> bytes:
    """Return a row of gray levels as TIFF 6.0 describes a file with one uncompressed strip."""
    row = b"".join(level.to_bytes(bits // 8, "little") for level in levels)
    entries = [
        (256, 4, len(levels)),  # ImageWidth
        (257, 4, 1),  # ImageLength
        (258, 3, bits),  # BitsPerSample
        (259, 3, 1),  # Compression: none
        (262, 3, 0 if white_is_zero else 1),  # PhotometricInterpretation
        (273, 4, 8),  # StripOffsets
        (277, 3, 1),  # SamplesPerPixel
        (278, 4, 1),  # RowsPerStrip
        (279, 4, len(row)),  # StripByteCounts
    ]
    directory = struct.pack("<H", len(entries))
    directory += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    padding = bytes(len(row) % 2)
    header = b"II*\0" + struct.pack("<I", 8 + len(row) + len(padding))
    return header + row + padding + directory + bytes(4)


def test_a_tiff_of_32_bits_in_which_zero_is_white_is_refused() -> None:
    """Pillow 13 does not know the kind, so nothing reads it as its negative."""
    with pytest.raises(DecodeError):
        reencode(gray_tiff([0, 2**31], 32, white_is_zero=True), None, 95, STORED)


@pytest.mark.parametrize("bits", [8, 16])
def test_zero_is_white_if_a_tiff_says_so(bits: int) -> None:
    """TIFF 6.0, PhotometricInterpretation: of WhiteIsZero the highest level is black."""
    levels = [level << (bits - 8) for level in (0, 3, 128, 252, 255)]
    for white_is_zero, expected in ((False, [0, 3, 128, 252, 255]), (True, [255, 252, 127, 3, 0])):
        with Image.open(io.BytesIO(gray_tiff(levels, bits, white_is_zero))) as image:
            pixels = np.asarray(to_rgb(image, StoredColor("gray", 8), STORED))
        assert pixels[0, :, 0].tolist() == expected


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt", b"iTXt", b"iTXt plain"])
@pytest.mark.parametrize("name", [b"exif", b"APP1"])
def test_orientation_in_the_text_of_a_png_is_applied(kind: bytes, name: bytes) -> None:
    """As ImageMagick stores it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    block = exif.tobytes()
    lines = block.hex().encode()
    text = b"\n" + name + b"\n" + b"%8d\n" % len(block)
    text += b"\n".join(lines[start : start + 72] for start in range(0, len(lines), 72))
    body = {
        b"tEXt": text,
        b"zTXt": b"\0" + zlib.compress(text),
        b"iTXt": b"\1\0\0\0" + zlib.compress(text),
        b"iTXt plain": b"\0\0\0\0" + text,
    }[kind]
    chunk = kind[:4] + b"Raw profile type " + name + b"\0" + body
    added = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    stored = photo(20, 30)
    plain = encode(stored, "PNG")
    content = plain[:33] + added + plain[33:]
    expected = np.asarray(stored.transpose(Image.Transpose.ROTATE_270))
    assert image_size(content) == expected.shape[:2] == (30, 20)
    assert np.array_equal(decode(content, DecodeSpec(30, 20)), expected)
    # Damage of the text leaves the image as it is stored.
    damaged = content.replace(body[4:], bytes(len(body) - 4))
    assert image_size(damaged) == (20, 30)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_laid_on_white(mode: str) -> None:
    image = Image.new("RGBA", (16, 16), (200, 0, 0, 0))
    content = encode(image.convert(mode), "PNG")
    assert decode(content, DecodeSpec(16, 16)).min() == 255


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_truncated_image_raises(image_format: str) -> None:
    content = encode(photo(90, 90), image_format)
    for divisor in (4, 2, 1.2):
        with pytest.raises(DecodeError) as caught:
            decode(content[: int(len(content) / divisor)], DecodeSpec(32, 32))
        assert caught.value.reason == "image-corrupt"


@settings(max_examples=60, deadline=None)
@given(
    image_format=st.sampled_from(["JPEG", "PNG", "WEBP"]),
    position=st.floats(0, 1, exclude_max=True),
    noise=st.binary(min_size=1, max_size=40),
)
def test_damaged_image_decodes_or_raises(image_format: str, position: float, noise: bytes) -> None:
    content = encode(photo(48, 48), image_format)
    start = int(len(content) * position)
    damaged = content[:start] + noise + content[start + len(noise) :]
    with suppress(DecodeError):
        decode(damaged, DecodeSpec(16, 16))
    with suppress(DecodeError):
        image_size(damaged)


@given(content=st.binary(max_size=200))
def test_arbitrary_bytes_raise_decode_error(content: bytes) -> None:
    for signature in (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"):
        with pytest.raises(DecodeError):
            decode(signature + content, DecodeSpec(8, 8))


def test_bytes_after_the_end_of_a_jpeg_are_ignored() -> None:
    """Phones append videos and more images; libjpeg-turbo ignores what it does not read."""
    content = encode(photo(40, 40), "JPEG")
    expected = decode(content, DecodeSpec(40, 40))
    assert np.array_equal(decode(content + bytes(5000) + content, DecodeSpec(40, 40)), expected)


def png_chunk(chunk_type: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(chunk_type + content)
    return struct.pack(">I", len(content)) + chunk_type + content + struct.pack(">I", checksum)


def png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)


def test_pillow_syntax_error_becomes_decode_error() -> None:
    """Pillow raises SyntaxError, not ValueError, for a PNG chunk without a type."""
    rows = zlib.compress(bytes(8 * (1 + 24)))
    broken = png_header(8, 8) + png_chunk(b"IDAT", rows[:5])
    broken += png_chunk(bytes(4), rows[5:]) + png_chunk(b"IEND", b"")
    with pytest.raises(SyntaxError), Image.open(io.BytesIO(broken)) as image:
        image.load()
    with pytest.raises(DecodeError, match="image-corrupt"):
        decode(broken, DecodeSpec(8, 8))


@pytest.mark.parametrize("side", [12_000, 40_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bomb_is_rejected_by_its_header(side: int) -> None:
    """A few bytes whose header announces gigabytes: no row of them is decoded."""
    bomb = (
        png_header(side, side)
        + png_chunk(b"IDAT", zlib.compress(bytes(1000)))
        + png_chunk(b"IEND", b"")
    )
    with pytest.raises(DecodeError, match="image-bomb"):
        decode(bomb, DecodeSpec(8, 8))
    jpeg = bytearray(encode(photo(16, 16), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    with pytest.raises(DecodeError, match="image-bomb"):
        decode(bytes(jpeg), DecodeSpec(8, 8))


def test_hundred_megapixels_are_decoded_at_an_eighth() -> None:
    """The buffer takes 4.7 MB instead of 300: memory for a large image is bounded."""
    content = encode(Image.new("RGB", (10_000, 10_000), (10, 200, 90)), "JPEG")
    pixels = decode(content, DecodeSpec(512, 512, decode_mode="fast"))
    assert np.abs(pixels.reshape(-1, 3).astype(int) - [10, 200, 90]).max() <= 2
    buffer = image_decoder._buffers.content
    assert buffer is None or buffer.nbytes <= 3 * image_decoder.LARGE_PIXELS


def wide_gamut_profile() -> bytes:
    """Return an ICC profile like Display P3: an sRGB profile whose red and green are exchanged."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    tags = {bytes(profile[at : at + 4]): at for at in range(132, 132 + 12 * profile[131], 12)}
    red, green = (profile[tags[name] + 4 : tags[name] + 8] for name in (b"rXYZ", b"gXYZ"))
    profile[tags[b"rXYZ"] + 4 : tags[b"rXYZ"] + 8] = green
    profile[tags[b"gXYZ"] + 4 : tags[b"gXYZ"] + 8] = red
    return bytes(profile)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_color_profile_is_ignored_unless_srgb_is_requested(image_format: str) -> None:
    image = photo(40, 40)
    options = {"lossless": True} if image_format == "WEBP" else {}
    content = encode(image, image_format, icc_profile=wide_gamut_profile(), **options)
    ignored = decode(content, DecodeSpec(40, 40, color=STORED))
    assert difference(ignored, decode_with_pillow(content, 40))[0] <= 1
    converted = decode(content, DecodeSpec(40, 40))
    assert difference(converted, ignored[..., [1, 0, 2]])[0] <= 2
    assert difference(converted, ignored)[0] > 20


def test_gray_and_transparent_images_keep_their_tones_with_an_srgb_profile() -> None:
    """A profile of another color space than the pixels is ignored, as is an sRGB profile."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = photo(40, 40)
    transparent = image.copy()
    transparent.putalpha(image.getchannel("R"))
    for source in (image, image.convert("L"), image.convert("P"), transparent):
        content = encode(source, "PNG", icc_profile=srgb)
        converted = decode(content, DecodeSpec(40, 40))
        assert difference(converted, decode(content, DecodeSpec(40, 40)))[0] <= 1
    content = encode(image.convert("L"), "JPEG", icc_profile=b"no profile")
    assert decode(content, DecodeSpec(40, 40)).std() > 1


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_profile_of_a_transparent_image_is_applied_to_its_colors(mode: str) -> None:
    image = Image.new("RGBA", (16, 16), (200, 30, 0, 255))
    content = encode(image.convert(mode), "PNG", icc_profile=wide_gamut_profile())
    pixels = decode(content, DecodeSpec(16, 16))
    assert np.abs(pixels.reshape(-1, 3).astype(int) - [30, 200, 0]).max() <= 3


@settings(max_examples=30, deadline=None)
@given(height=st.integers(9, 90), width=st.integers(9, 90), key=st.integers(0, 2**40))
def test_random_crop_is_a_function_of_its_key(height: int, width: int, key: int) -> None:
    content = encode(photo(height, width), "PNG")
    spec = DecodeSpec(8, 8, crop="random", seed=5)
    first = decode(content, spec, 1, key)
    assert np.array_equal(decode(content, spec, 1, key), first)


def test_random_crops_reach_both_ends() -> None:
    wide = np.zeros((8, 80, 3), np.uint8)
    wide[:, :, 0] = np.arange(80) * 3
    content = encode(Image.fromarray(wide), "PNG")
    spec = DecodeSpec(8, 8, crop="random")
    starts = {int(decode(content, spec, 0, key)[0, 0, 0]) // 3 for key in range(600)}
    assert min(starts) == 0
    assert max(starts) >= 71
    assert len(starts) > 60
    assert int(decode(content, DecodeSpec(8, 8))[0, 0, 0]) // 3 == 36


@pytest.mark.parametrize(("height", "width"), [(32, 64), (64, 32), (48, 48)])
def test_crop_need_not_be_square(height: int, width: int) -> None:
    content = encode(photo(120, 120), "JPEG")
    pixels = decode(content, DecodeSpec(height, width))
    with Image.open(io.BytesIO(content)) as image:
        rgb = image.convert("RGB")
    crop_height, crop_width = min(120, 120 * height // width), min(120, 120 * width // height)
    left, top = (120 - crop_width) // 2, (120 - crop_height) // 2
    expected = rgb.crop((left, top, left + crop_width, top + crop_height)).resize(
        (width, height), 2
    )
    assert difference(pixels, np.asarray(expected))[1] < 1.5


def test_image_size_needs_only_the_header() -> None:
    for image_format in ("JPEG", "PNG"):
        content = encode(photo(40, 70), image_format)
        assert image_size(content[: max(700, len(content) // 3)]) == (40, 70)
    assert image_size(encode(photo(40, 70), "WEBP")) == (40, 70)
    with pytest.raises(DecodeError):
        image_size(b"no image")
