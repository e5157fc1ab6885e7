"""What the color policy makes of an image, whatever decodes it, and what its file states."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageCms
from sm_train.entrypoints.data_prep.packing.image_metadata import read_image_metadata
from sm_train.entrypoints.data_prep.packing.reencode import decode_upright, reencode
from sm_train.entrypoints.images.conversions import profile_conversion
from sm_train.entrypoints.images.decoder_pool import InProcessDecoders
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.images.stored_color import read_stored_color
from sm_train.entrypoints.job_interface.job_config import (
    DEFAULT_COLOR,
    UNRECORDED_COLOR,
    ColorPolicy,
)

from tests.support.images.color_pictures import (
    CHART,
    COLORS,
    GRAY_CHART,
    LEVELS,
    avif,
    centers,
    cmyk_profile,
    deep_png,
    encode,
    heic,
    patches,
    png_chunk,
    png_with,
    rgb_table_profile,
)
from tests.support.images.icc_profiles import (
    gray_in_srgb,
    gray_profile,
    in_srgb,
    rgb_profile,
    with_tag,
)

SIDE = CHART.width
PQ, HLG = b"\x09\x10\x00\x01", b"\x09\x12\x00\x01"
WIDE_SPACES = ["Adobe RGB", "Display P3", "ProPhoto RGB"]


def decode(
    content: bytes, side: int = SIDE, policy: ColorPolicy = DEFAULT_COLOR
) -> NDArray[np.uint8]:
    out = torch.empty((side, side, 3), dtype=torch.uint8)
    DecodeSpec(side, side, color=policy).decode(content, out)
    return out.numpy()


def little_cms(
    image: Image.Image, profile: bytes, flags: ImageCms.Flags = ImageCms.Flags.NONE
) -> NDArray[np.uint8]:
    transform: Any = ImageCms.buildTransform(
        io.BytesIO(profile), ImageCms.createProfile("sRGB"), image.mode, "RGB", flags=flags
    )
    return np.asarray(transform.apply(image))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in WIDE_SPACES for kind in ("curv", "para")),
        # Little CMS moves these to black by its perceptual intent.
        ("black of 1 %", "curv"),
        ("sRGB, black of 5 %", "curv"),
    ],
)
def test_a_matrix_and_curves_are_off_by_at_most_a_level(name: str, kind: str) -> None:
    """Of what the profile defines, for all colors and for dark ones."""
    conversion = profile_conversion(rgb_profile(name, kind), "RGB")
    assert conversion is not None
    colors = np.random.default_rng(1).integers(0, 256, (512, 512, 3)).astype(np.uint8)
    for pixels in (colors, colors // 8):
        assert np.abs(conversion(pixels) - np.rint(in_srgb(pixels, name))).max() <= 1


@pytest.mark.parametrize("kind", ["curv", "para"])
def test_srgb_is_recognized_by_content(kind: str) -> None:
    profile = rgb_profile("sRGB", kind)
    assert profile_conversion(profile, "RGB") is None
    assert profile_conversion(profile, "L") is None
    assert read_stored_color(encode(CHART, "PNG", icc_profile=profile)).code == "sRGB/RGB/8"


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("name", WIDE_SPACES)
def test_rgb_is_converted_by_every_decoder(name: str, image_format: str) -> None:
    content = encode(CHART, image_format, icc_profile=rgb_profile(name))
    stored = centers(decode(content, policy=UNRECORDED_COLOR)).astype(np.uint8)
    expected = in_srgb(stored, name)
    again = decode(reencode(content, None, 100, DEFAULT_COLOR), policy=UNRECORDED_COLOR)
    enriched = decode_upright(content, SIDE, InProcessDecoders(), DEFAULT_COLOR)
    for pixels, levels in ((decode(content), 1), (enriched, 1), (again, 4)):
        assert np.abs(centers(pixels) - expected).max() <= levels
    assert np.abs(stored - expected).mean() > 10


@pytest.mark.parametrize("name", ["gamma 1.8", "dot gain 20 %", "black of 1 %"])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("mode", ["L", "LA"])
def test_gray_is_converted_with_and_without_alpha(name: str, image_format: str, mode: str) -> None:
    image = GRAY_CHART.convert(mode)
    if mode == "LA" and image_format != "PNG":
        return
    content = encode(image, image_format, icc_profile=gray_profile(name))
    if image_format == "TIFF":
        content = reencode(content, None, 100, DEFAULT_COLOR)
    expected = np.rint(gray_in_srgb(LEVELS, name))  # Little CMS 2.16 is off by up to 1.14 levels
    for channel in range(3):
        assert np.abs(centers(decode(content))[..., channel] - expected).max() <= 1


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_an_rgb_profile_applies_to_a_gray_picture(image_format: str) -> None:
    content = encode(GRAY_CHART, image_format, icc_profile=rgb_profile("ProPhoto RGB"))
    expected = in_srgb(LEVELS[..., None].repeat(3, 2), "ProPhoto RGB")
    assert np.abs(centers(decode(content)) - expected).max() <= 1


@pytest.mark.parametrize("image_format", ["JPEG", "TIFF"])
def test_cmyk_is_converted_as_little_cms_does(image_format: str) -> None:
    cmyk, profile = CHART.convert("CMYK"), cmyk_profile()
    content = encode(cmyk, image_format, icc_profile=profile)
    with Image.open(io.BytesIO(content)) as image:
        expected = little_cms(image, profile)
    if image_format == "TIFF":
        content = reencode(content, None, 100, DEFAULT_COLOR)
    off = np.abs(decode(content).astype(int) - expected)
    assert off.max() <= (3 if image_format == "TIFF" else 0)
    assert read_stored_color(encode(cmyk, "JPEG", icc_profile=profile)).code == "CMYK/CMYK/8"


def test_profiles_with_tables_are_converted_more_exactly_than_by_little_cms() -> None:
    """Little CMS makes a table of 33 steps of a profile, except with NOOPTIMIZE.

    The profile's colors lie far outside of sRGB: at its limits, each table is off.
    """
    profile = rgb_table_profile()
    content = encode(CHART, "PNG", icc_profile=profile)
    exact = little_cms(CHART, profile, ImageCms.Flags.NOOPTIMIZE)
    assert np.abs(centers(decode(content)).astype(int) - centers(exact)).max() <= 1

    conversion = profile_conversion(profile, "RGB")
    assert conversion is not None
    colors = np.random.default_rng(1).integers(0, 256, (512, 512, 3)).astype(np.uint8)
    image = Image.fromarray(colors)
    exact = little_cms(image, profile, ImageCms.Flags.NOOPTIMIZE).astype(int)
    off, lcms_off = (
        np.abs(converted - exact) for converted in (conversion(colors), little_cms(image, profile))
    )
    assert (off > 1).mean() < 0.002 < 0.008 < (lcms_off > 1).mean()
    assert off.max() < lcms_off.max()


def test_a_conversion_writes_into_parts_of_an_array() -> None:
    """Batches are transposed or cropped views in some places."""
    conversion = profile_conversion(rgb_profile("Adobe RGB"), "RGB")
    assert conversion is not None
    colors = np.random.default_rng(1).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    out = np.zeros((30, 40, 3), np.uint8)
    part = out.transpose(1, 0, 2)[5:25]
    assert conversion(colors[:, ::-1], part) is part
    assert np.array_equal(part[:, ::-1], conversion(colors))
    assert not out[:, :5].any()


def test_profiles_of_other_channels_and_damaged_ones_are_ignored() -> None:
    for profile in (cmyk_profile(), gray_profile("gamma 1.8"), b"no profile", bytes(200)):
        content = encode(CHART, "PNG", icc_profile=profile)
        assert np.array_equal(decode(content), np.asarray(CHART))


@pytest.mark.parametrize("size", [96, 100])
def test_a_scaled_crop_has_the_colors_of_the_whole_image(size: int) -> None:
    """Colors are converted after cropping and scaling; of even patches that changes nothing."""
    content = encode(CHART, "JPEG", icc_profile=rgb_profile("Adobe RGB"))
    whole = centers(decode(content))
    step = size / 8
    at = (np.arange(8) * step + step / 2).astype(int)
    assert np.abs(decode(content, size)[np.ix_(at, at)] - whole).max() <= 2


@pytest.mark.parametrize("encoder", [avif, heic])
def test_color_codes_alone_are_converted(encoder: Any) -> None:
    plain = reencode(encoder(12, 13), None, 100, UNRECORDED_COLOR)
    converted = reencode(encoder(12, 13), None, 100, DEFAULT_COLOR)
    stored = centers(decode(plain)).astype(np.uint8)
    assert np.abs(centers(decode(converted)) - in_srgb(stored, "Display P3")).mean() < 1
    for primaries, transfer in ((1, 13), (2, 2)):
        content = encoder(primaries, transfer)
        same = [
            reencode(content, None, 100, policy) for policy in (DEFAULT_COLOR, UNRECORDED_COLOR)
        ]
        assert same[0] == same[1]


def test_an_rgb_profile_whose_colors_stay_as_stored_is_kept() -> None:
    content = encode(CHART, "TIFF", icc_profile=(profile := rgb_profile("Display P3")))
    kept = reencode(content, None, 100, UNRECORDED_COLOR)
    assert read_stored_color(kept).profile == profile
    assert read_stored_color(reencode(content, None, 100, DEFAULT_COLOR)).profile is None


HDR_IMAGES = {
    "PNG PQ": png_with((b"cICP", PQ)),
    "PNG HLG": png_with((b"cICP", HLG)),
    "profile": encode(
        CHART,
        "JPEG",
        icc_profile=with_tag(rgb_profile("Display P3"), "cicp", b"cicp\0\0\0\0" + PQ),
    ),
}


@pytest.mark.parametrize("content", HDR_IMAGES.values(), ids=HDR_IMAGES)
def test_hdr_is_rejected_unless_it_is_kept(content: bytes) -> None:
    for reject in (decode, lambda found: read_image_metadata(found, DEFAULT_COLOR)):
        with pytest.raises(DecodeError, match=r"image-hdr: its levels are (PQ|HLG)"):
            reject(content)
    kept = ColorPolicy("ignore", "keep")
    assert np.abs(decode(content, policy=kept).astype(int) - np.asarray(CHART)).max() <= 3
    metadata = read_image_metadata(content, kept)
    assert metadata.color.code.split("/")[-1] in ("HDR PQ", "HDR HLG")


@pytest.mark.parametrize("encoder", [avif, heic])
@pytest.mark.parametrize("transfer", [16, 18])
def test_hdr_that_is_converted_is_rejected_unless_it_is_kept(encoder: Any, transfer: int) -> None:
    with pytest.raises(DecodeError, match="image-hdr"):
        reencode(encoder(9, transfer), None, 95, DEFAULT_COLOR)
    assert reencode(encoder(9, transfer), None, 95, ColorPolicy("srgb", "keep"))


ADOBE_CHROMATICITIES = struct.pack(">8I", 31270, 32900, 64000, 33000, 21000, 71000, 15000, 6000)
SRGB_CHROMATICITIES = struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (png_with(), "none/RGB/8"),
        (png_with((b"cICP", b"\x0c\x0d\x00\x01")), "none/RGB/8/cICP"),
        (png_with((b"cICP", b"\x01\x0d\x00\x01")), "none/RGB/8"),
        (png_with((b"gAMA", struct.pack(">I", 100_000))), "none/RGB/8/gAMA"),
        (
            png_with((b"gAMA", struct.pack(">I", 45_455)), (b"cHRM", SRGB_CHROMATICITIES)),
            "none/RGB/8",
        ),
        (
            png_with((b"gAMA", struct.pack(">I", 45_470)), (b"cHRM", ADOBE_CHROMATICITIES)),
            "none/RGB/8/cHRM",
        ),
        # What is stated as sRGB is sRGB, whatever else there is.
        (png_with((b"sRGB", b"\0"), (b"gAMA", struct.pack(">I", 50_000))), "none/RGB/8"),
        (png_with(image=GRAY_CHART), "none/gray/8"),
        (encode(GRAY_CHART, "JPEG"), "none/gray/8"),
        (deep_png(patches(COLORS).astype(np.uint16), rgb_profile("Adobe RGB")), "Adobe RGB/RGB/16"),
        (encode(CHART, "WEBP", icc_profile=rgb_profile("ProPhoto RGB")), "ProPhoto RGB/RGB/8"),
        (encode(CHART, "JPEG", icc_profile=rgb_table_profile()), "other RGB/RGB/8"),
    ],
)
def test_an_index_names_what_a_file_states_of_its_colors(content: bytes, code: str) -> None:
    assert read_stored_color(content).code == code
    assert read_stored_color(content[: len(content) - 40]).code == code


@pytest.mark.parametrize("name", ["Display P3", "ProPhoto RGB"])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_the_same_picture_in_two_spaces_has_one_hash(name: str, image_format: str) -> None:
    """Agencies deliver a picture in sRGB and in another space."""
    stored = np.asarray(
        Image.fromarray(patches(COLORS)).resize((512, 512), Image.Resampling.BICUBIC)
    )
    muted = (stored // 3 + 80).astype(np.uint8)  # inside of both spaces
    shown = np.rint(in_srgb(muted, name)).astype(np.uint8)
    wide = encode(Image.fromarray(muted), image_format, icc_profile=rgb_profile(name))
    plain = encode(Image.fromarray(shown), image_format)
    found = [read_image_metadata(content, DEFAULT_COLOR, colors=True) for content in (wide, plain)]
    hashes = [metadata.phash for metadata in found]
    assert hashes[0] is not None
    assert hashes[1] is not None
    assert (hashes[0] ^ hashes[1]).bit_count() <= 2
    signatures = [np.frombuffer(item.colors or b"", np.uint8).astype(int) for item in found]
    assert np.abs(signatures[0] - signatures[1]).max() <= 3


def test_a_profile_without_light_breaks_nothing() -> None:
    """Little CMS accepts primaries of zero."""
    profile = bytearray(rgb_profile("Adobe RGB"))
    for name in (b"rXYZ", b"gXYZ", b"bXYZ"):
        at = profile.index(name)
        offset = int.from_bytes(profile[at + 4 : at + 8], "big")
        profile[offset + 8 : offset + 20] = bytes(12)
    content = encode(CHART, "JPEG", icc_profile=bytes(profile))
    assert decode(content).shape == (SIDE, SIDE, 3)
    assert read_image_metadata(content, DEFAULT_COLOR).phash is not None


def segments_of(profile: bytes, parts: list[tuple[int, int, bytes]]) -> bytes:
    """Return a JPEG with a profile in segments: their numbers, how many they say, and contents."""
    content = encode(CHART, "JPEG")
    added = b""
    for number, count, part in parts:
        block = b"ICC_PROFILE\0" + bytes([number, count]) + part
        added += b"\xff\xe2" + struct.pack(">H", len(block) + 2) + block
    return content[:2] + added + content[2:]


def test_a_profile_whose_segments_are_not_whole_is_ignored() -> None:
    profile = rgb_profile("Adobe RGB")
    half = len(profile) // 2
    first, second = (1, 2, profile[:half]), (2, 2, profile[half:])
    assert read_stored_color(segments_of(profile, [second, first])).profile == profile
    for parts in ([first], [second], [first, first, second], [first, (2, 3, profile[half:])]):
        assert read_stored_color(segments_of(profile, parts)).profile is None


def test_hdr_that_is_kept_is_as_stored_whatever_states_it() -> None:
    kept = ColorPolicy("srgb", "keep")
    for content in HDR_IMAGES.values():
        assert np.abs(decode(content, policy=kept).astype(int) - np.asarray(CHART)).max() <= 3


def test_color_codes_of_a_png_come_before_its_profile() -> None:
    adobe = (b"iCCP", b"x\0\0" + zlib.compress(rgb_profile("Adobe RGB")))
    srgb, p3 = (b"cICP", b"\x01\x0d\x00\x01"), (b"cICP", b"\x0c\x0d\x00\x01")
    assert np.array_equal(decode(png_with(srgb, adobe)), np.asarray(CHART))
    assert read_stored_color(png_with(srgb, adobe)).code == "none/RGB/8"
    # Readers that do not know other codes take the profile.
    assert read_stored_color(png_with(p3, adobe)).code == "Adobe RGB/RGB/8"


def test_deep_gray_with_alpha_is_converted() -> None:
    """Pillow 13 reads it as RGBA."""
    levels = LEVELS.astype(np.uint16) * 257
    rows = np.stack([patches(levels), np.full((SIDE, SIDE), 65535, np.uint16)], -1)
    data = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 16, 4, 0, 0, 0)),
        (b"iCCP", b"x\0\0" + zlib.compress(gray_profile("dot gain 20 %"))),
        (b"IDAT", zlib.compress(data)),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)
    expected = np.rint(gray_in_srgb(LEVELS, "dot gain 20 %"))
    assert np.abs(centers(decode(content))[..., 0] - expected).max() <= 1


@pytest.mark.parametrize("mode", ["RGBA", "P", "L"])
def test_a_profile_that_changes_no_pixel_does_not_change_the_hash(mode: str) -> None:
    image = CHART.convert("RGBA")
    image.putalpha(GRAY_CHART)
    image = image.convert(mode)
    contents = [encode(image, "PNG"), encode(image, "PNG", icc_profile=rgb_profile("sRGB"))]
    hashes = {read_image_metadata(content, DEFAULT_COLOR).phash for content in contents}
    assert len(hashes) == 1


def test_the_profile_of_jpeg_2000_is_applied() -> None:
    """Pillow 13 does not tell it: a box `colr` with method 2, after an enumerated one here."""
    content = encode(CHART, "JPEG2000")
    at = content.index(b"colr") - 4
    profile = rgb_profile("Adobe RGB")
    box = struct.pack(">I", len(profile) + 11) + b"colr\2\0\0" + profile
    start = content.index(b"jp2h") - 4
    (size,) = struct.unpack(">I", content[start : start + 4])
    header = struct.pack(">I", size + len(box)) + content[start + 4 : at] + box
    content = content[:start] + header + content[at:]
    converted = decode(reencode(content, None, 100, DEFAULT_COLOR), policy=UNRECORDED_COLOR)
    assert np.abs(centers(converted) - in_srgb(COLORS, "Adobe RGB")).mean() < 1
