#!/usr/bin/env bash
# Pillow 13.0.0 (Little CMS 2.19), ImageCms.buildTransform without flags, and OpenColorIO 2.6.0.
#
# Expected: an RGB profile whose colors are a table is converted to sRGB with rounding errors of one
# or two levels; asking for no optimization changes the time, not the colors.
# Seen: without flags Little CMS samples the conversion at 33 steps along each axis, and loses what
# lies between: where colors leave sRGB, levels are off by up to 16 from what the same library
# gives with ImageCms.Flags.NOOPTIMIZE. HIGHRESPRECALC, 49 steps, leaves up to 11. A table of 65
# steps that OpenColorIO interpolates is nearer, and takes a quarter of the time.
# So: photos of scanners and printers in wide spaces are trained on with other colors at the limits
# of sRGB, by every program that calls ImageCms as its guide does; and two programs differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --quiet --quiet --disable-pip-version-check \
    "pillow==13.0.0" "numpy==2.4.6" "opencolorio==2.6.0" \
    2>"$folder/pip.log" || { cat "$folder/pip.log"; exit 1; }
"$folder/venv/bin/python" - >"$folder/seen" <<'PYTHON'
import io
import struct

import numpy
import PyOpenColorIO as ocio
from PIL import Image, ImageCms, features

STEPS = 33


def profile():
    """Return a profile (ICC.1:2001, lut16Type) of a space wider than sRGB, with linear light."""
    axis = numpy.linspace(0, 1, STEPS)
    red, green, blue = (a.reshape(-1) for a in numpy.meshgrid(axis, axis, axis, indexing="ij"))
    lab = [
        100 * (0.25 * red + 0.65 * green + 0.1 * blue),
        128 + 60 * (red - green),
        128 + 70 * (0.5 * (red + green) - blue),
    ]
    scale = [65280 / 100, 256, 256]
    table = numpy.stack([v * s for v, s in zip(lab, scale, strict=True)], axis=1)
    head = b"mft2" + struct.pack(">I4B", 0, 3, 3, STEPS, 0)
    head += struct.pack(">9i", *(65536 * v for v in (1, 0, 0, 0, 1, 0, 0, 0, 1)))
    curves = struct.pack(">6H", *[0, 65535] * 3)
    tag = head + struct.pack(">2H", 2, 2) + curves + table.round().astype(">u2").tobytes() + curves
    white = b"XYZ " + struct.pack(">I3i", 0, 63190, 65536, 54061)
    start = 128 + 4 + 2 * 12
    tags = struct.pack(">I", 2)
    tags += b"wtpt" + struct.pack(">2I", start, len(white))
    tags += b"A2B0" + struct.pack(">2I", start + len(white), len(tag))
    header = struct.pack(
        ">I4sI4s4s4s12x4s28x3i48x", start + len(white) + len(tag), b"    ", 0x02400000,
        b"scnr", b"RGB ", b"Lab ", b"acsp", 63190, 65536, 54061,
    )
    return header + tags + white + tag


def converted(colors, flags):
    transform = ImageCms.buildTransform(
        io.BytesIO(profile()), ImageCms.createProfile("sRGB"), "RGB", "RGB", flags=flags
    )
    return numpy.asarray(transform.apply(Image.fromarray(colors)))


def by_table(colors, steps):
    """Return what OpenColorIO makes of a table of exact colors."""
    levels = numpy.linspace(0, 255, steps).round().astype(numpy.uint8)
    grid = numpy.stack(numpy.meshgrid(levels, levels, levels, indexing="ij"), axis=-1)
    exact = converted(grid.reshape(1, -1, 3), ImageCms.Flags.NOOPTIMIZE)
    positions = numpy.interp(numpy.arange(256), levels, numpy.linspace(0, 1, steps))
    curve = ocio.Lut1DTransform(256, False)
    curve.setData(numpy.repeat(positions, 3).astype(numpy.float32))
    table = ocio.Lut3DTransform(steps)
    table.setInterpolation(ocio.INTERP_TETRAHEDRAL)
    table.setData((exact / 255).astype(numpy.float32).reshape(-1))
    both = ocio.GroupTransform([curve, table])
    depth = ocio.BIT_DEPTH_UINT8
    processor = ocio.Config.CreateRaw().getProcessor(both)
    processor = processor.getOptimizedCPUProcessor(depth, depth, ocio.OPTIMIZATION_DEFAULT)
    out = colors.copy()
    height, width, _ = out.shape
    order = ocio.CHANNEL_ORDERING_RGB
    processor.apply(ocio.PackedImageDesc(out, width, height, order, depth, 1, 3, 3 * width))
    return out


colors = numpy.random.default_rng(0).integers(0, 256, (512, 512, 3)).astype(numpy.uint8)
exact = converted(colors, ImageCms.Flags.NOOPTIMIZE).astype(int)
print("Little CMS", features.version("littlecms2"))
for name, pixels in (
    ("without flags", converted(colors, ImageCms.Flags.NONE)),
    ("HIGHRESPRECALC", converted(colors, ImageCms.Flags.HIGHRESPRECALC)),
    ("OpenColorIO, 65 steps", by_table(colors, 65)),
):
    off = abs(pixels - exact)
    print(f"{name}: at most {off.max()} levels off, {(off > 1).mean():.2%} by more than one")
PYTHON
diff - "$folder/seen" <<'SEEN'
Little CMS 2.19
without flags: at most 16 levels off, 0.80% by more than one
HIGHRESPRECALC: at most 11 levels off, 0.39% by more than one
OpenColorIO, 65 steps: at most 8 levels off, 0.19% by more than one
SEEN
