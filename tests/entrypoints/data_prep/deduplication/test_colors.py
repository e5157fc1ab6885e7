"""Near-duplicates are confirmed in color: logos on white stay, copies are found as by the hash."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageDraw
from sm_train.entrypoints.data_prep.deduplication.colors import SIGNATURE_BYTES, are_alike
from sm_train.entrypoints.data_prep.deduplication.compared_images import NONE, Images
from sm_train.entrypoints.data_prep.deduplication.near_duplicates import near_duplicates
from sm_train.entrypoints.data_prep.packing.image_metadata import read_image_metadata
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR as SRGB

from tests.support.images.icc_profiles import rgb_profile

BITS = 3


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def logo(number: int) -> Image.Image:
    """Return a figure in the middle of a white square of 256 pixels.

    Six figures take turns: a disk, a square, a triangle, a star, a ring, and a bar with a dot of
    another color. Size (100 to 160 pixels) and colors (up to a level of 219) are random.
    """
    chosen = random.Random(number)
    image = Image.new("RGB", (256, 256), "white")
    draw = ImageDraw.Draw(image)
    color, second = (tuple(chosen.randrange(220) for _ in range(3)) for _ in range(2))
    size, middle, figure = chosen.choice([50, 60, 70, 80]), 128, number % 6
    box = (middle - size, middle - size, middle + size, middle + size)
    if figure == 0:
        draw.ellipse(box, fill=color)
    elif figure == 1:
        draw.rectangle(box, fill=color)
    elif figure == 2:
        draw.polygon([(middle, box[1]), (box[2], box[3]), (box[0], box[3])], fill=color)
    elif figure == 3:
        radii = [size if corner % 2 == 0 else size / 2.2 for corner in range(10)]
        corners = [
            (
                middle + radius * math.sin(corner * math.pi / 5),
                middle - radius * math.cos(corner * math.pi / 5),
            )
            for corner, radius in enumerate(radii)
        ]
        draw.polygon(corners, fill=color)
    elif figure == 4:
        draw.ellipse(box, fill=color)
        draw.ellipse([middle - size // 2] * 2 + [middle + size // 2] * 2, fill="white")
    else:
        draw.rectangle((box[0], middle - size // 2, box[2], middle + size // 2), fill=color)
        draw.ellipse([middle - size // 3] * 2 + [middle + size // 3] * 2, fill=second)
    return image


def scene(number: int, side: int = 400) -> Image.Image:
    """Return a smooth picture of 6 × 6 random colors."""
    small = np.random.default_rng(number).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def images(contents: list[bytes], *, colors: bool = True) -> Images:
    """Return what is compared of images; without ``colors`` all have the same ones."""
    found = [read_image_metadata(content, SRGB, colors=True) for content in contents]
    signatures = b"".join(image.colors or b"" for image in found)
    values = np.frombuffer(signatures, np.uint8).reshape(-1, SIGNATURE_BYTES)
    hashes = np.array([image.phash for image in found], np.uint64)
    return Images(hashes, values if colors else np.full_like(values, 128))


def dropped(contents: list[bytes], *, colors: bool = True) -> set[int]:
    result = near_duplicates(images(contents, colors=colors), BITS)
    return set(np.flatnonzero(result != NONE).tolist())


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_different_logos_on_white_are_kept(kind: str) -> None:
    """Of 120 logos the hash alone drops a third."""
    logos = [encoded(logo(number), kind) for number in range(120)]
    assert len(dropped(logos, colors=False)) > 40
    assert len(dropped(logos)) <= 2


def copies(image: Image.Image) -> list[bytes]:
    """Return copies: half the size, recompressed, and cropped by 1 and 2 % at each side."""
    width, height = image.size
    half = image.resize((width // 2, height // 2), Image.Resampling.LANCZOS)
    cropped = []
    for share in (0.01, 0.02):
        x, y = round(width * share), round(height * share)
        cropped.append(image.crop((x, y, width - x, height - y)))
    return [
        encoded(half, "JPEG", quality=90),
        encoded(image, "JPEG", quality=40),
        encoded(image, "WEBP", quality=60),
        *(encoded(crop, "JPEG", quality=90) for crop in cropped),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("make", [logo, scene])
def test_copies_are_found_as_by_the_hash_alone(make: object) -> None:
    assert callable(make)
    lost = []
    for number in range(40):
        for copy in copies(make(number)):
            pair = [encoded(make(number)), copy]
            if dropped(pair, colors=False) and not dropped(pair):
                lost.append(number)
    assert lost == []


def test_a_transparent_logo_is_compared_on_white() -> None:
    figure = logo(0)
    transparent = figure.convert("RGBA")
    background = np.asarray(figure).min(axis=2) == 255
    pixels = np.asarray(transparent).copy()
    pixels[background] = (9, 9, 9, 0)
    [left, right] = [
        read_image_metadata(encoded(image), SRGB, colors=True).colors
        for image in (figure, Image.fromarray(pixels))
    ]
    assert left == right


def test_plain_images_have_few_signatures() -> None:
    """Their hashes are equal, and a scanner's white is never quite the same."""
    found = {
        read_image_metadata(
            encoded(Image.new("RGB", (64, 48), (243 + number, 250, 251))),
            SRGB,
            colors=True,
        ).colors
        for number in range(8)
    }
    assert len(found) == 1


def test_no_pairs_are_no_answers() -> None:
    known = images([encoded(logo(0)), encoded(logo(1))]).signatures
    assert not are_alike(known[:1], known[1:]).any()
    assert are_alike(known[:0], known[:0]).shape == (0,)


@pytest.mark.parametrize("name", ["Adobe RGB", "Display P3", "ProPhoto RGB"])
def test_one_picture_in_two_profiles_is_found(name: str) -> None:
    """An agency delivers a picture in sRGB, and in a larger space for print.

    Eight bits of ProPhoto RGB are coarse: of one picture four bits differ, as with JPEG quality 60.
    """
    profile = rgb_profile(name)
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    transform = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), opened, "RGB", "RGB")
    contents = []
    for number in range(13):
        picture = scene(number)
        converted = ImageCms.applyTransform(picture, transform)
        assert converted is not None
        contents += [
            encoded(picture, "JPEG", quality=92),
            encoded(converted, "JPEG", quality=92, icc_profile=profile),
        ]
    assert set(range(1, 26, 2)) - dropped(contents) <= {19}
