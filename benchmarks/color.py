"""Measures what the color policy adds to decoding, and by how much its colors differ.

The peer is the same decoder with ``icc_profile: ignore``: a JPEG of 768 px is decoded, cropped and
scaled to 512 px on one thread, by turns with both policies. Times are those of the CPU, the lower
quartile of all repetitions. The difference is from the profile itself, by which Little CMS converts
the same pixels without a table of its own; next to it, how far off Little CMS is with one.

    python benchmarks/color.py [--repeat 100]
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageCms
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.job_interface.job_config import (
    DEFAULT_COLOR,
    UNRECORDED_COLOR,
    ColorPolicy,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from photos import photo

from tests.support.images.color_pictures import cmyk_profile, rgb_table_profile
from tests.support.images.icc_profiles import gray_profile, rgb_profile

STORED_SIDE, SIDE = 768, 512


def main() -> None:
    """Measure each kind of profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=100)
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    kinds: dict[str, tuple[str, bytes | None]] = {
        "no profile": ("RGB", None),
        "sRGB": ("RGB", rgb_profile("sRGB")),
        "Adobe RGB": ("RGB", rgb_profile("Adobe RGB")),
        "Display P3": ("RGB", rgb_profile("Display P3")),
        "ProPhoto RGB": ("RGB", rgb_profile("ProPhoto RGB")),
        "RGB with a table": ("RGB", rgb_table_profile()),
        "gray": ("L", gray_profile("gamma 1.8")),
        "CMYK": ("CMYK", cmyk_profile()),
    }
    with Image.open(io.BytesIO(photo(STORED_SIDE, 1))) as image:
        image.load()
        for name, (mode, profile) in kinds.items():
            content = io.BytesIO()
            options = {} if profile is None else {"icc_profile": profile}
            image.convert(mode).save(content, "JPEG", quality=90, **options)
            ignored, converted = seconds(content.getvalue(), repeat)
            print(
                f"{name:18} ignore {ignored * 1e3:5.2f} ms, srgb {converted * 1e3:5.2f} ms: "
                f"{converted / ignored:.2f}x{difference(content.getvalue(), profile)}"
            )


def seconds(content: bytes, repeat: int) -> tuple[float, float]:
    """Return the CPU time of a decode with pixels as stored, and in sRGB."""
    times: dict[ColorPolicy, list[float]] = {UNRECORDED_COLOR: [], DEFAULT_COLOR: []}
    for _ in range(repeat):
        for policy, taken in times.items():
            started = time.process_time()
            decode(content, policy)
            taken.append(time.process_time() - started)
    ignored, converted = (sorted(taken)[repeat // 4] for taken in times.values())
    return ignored, converted


def decode(content: bytes, policy: ColorPolicy) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an image at the training size."""
    out = torch.empty((SIDE, SIDE, 3), dtype=torch.uint8)
    DecodeSpec(SIDE, SIDE, decode_mode="fast", color=policy).decode(content, out)
    return out.numpy()


def difference(content: bytes, profile: bytes | None) -> str:
    """Return by how many levels RGB differs from what the profile makes of the scaled pixels."""
    if profile is None or profile[16:20] != b"RGB ":
        return ""
    scaled = Image.fromarray(decode(content, UNRECORDED_COLOR))
    exact = little_cms(scaled, profile, ImageCms.Flags.NOOPTIMIZE)
    results: dict[str, np.ndarray[Any, Any]] = {
        "": decode(content, DEFAULT_COLOR),
        "Little CMS ": little_cms(scaled, profile, ImageCms.Flags.NONE),
    }
    return "".join(
        f", {name}at most {(off := np.abs(pixels.astype(int) - exact)).max()} off, "
        f"{(off > 1).mean():.3%} by more than 1"
        for name, pixels in results.items()
    )


def little_cms(
    image: Image.Image, profile: bytes, flags: ImageCms.Flags
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return an image's pixels in sRGB."""
    transform: Any = ImageCms.buildTransform(
        io.BytesIO(profile), ImageCms.createProfile("sRGB"), "RGB", "RGB", flags=flags
    )
    return np.asarray(transform.apply(image)).astype(int)


if __name__ == "__main__":
    main()
