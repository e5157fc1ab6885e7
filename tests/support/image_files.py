"""Image files, captions and folders of them for the tests of packing."""

from __future__ import annotations

import io
import random
from pathlib import Path

from PIL import Image


def image_bytes(seed: int = 0, size: tuple[int, int] = (48, 32), kind: str = "JPEG") -> bytes:
    """Return an encoded image of 8 × 8 colored blocks; equal arguments give equal bytes."""
    colors = random.Random(seed).randbytes(3 * 8 * 8)
    image = Image.frombytes("RGB", (8, 8), colors).resize(size, Image.Resampling.NEAREST)
    file = io.BytesIO()
    if kind == "MPO":  # a single image would be saved as a plain JPEG
        image.save(file, kind, save_all=True, append_images=[image])
    else:
        image.save(file, kind)
    return file.getvalue()


def write_pair(folder: Path, name: str, image: bytes, caption: str | bytes | None) -> Path:
    """Write an image and, unless ``caption`` is None, a ``.txt`` file with its caption."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image)
    if caption is not None:
        content = caption.encode() if isinstance(caption, str) else caption
        path.with_suffix(".txt").write_bytes(content)
    return path


def write_album(folder: Path, count: int, *, flat: bool = False) -> Path:
    """Write ``count`` valid pairs into a folder.

    Unless it is ``flat``, every third one is in its subfolder ``more``.
    """
    for number in range(count):
        subfolder = "more/" if number % 3 == 2 and not flat else ""
        write_pair(folder, f"{subfolder}{number:03}.jpg", image_bytes(number), f"picture {number}")
    return folder


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below ``folder``, and a marker for every folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"(folder)"
        for path in sorted(folder.rglob("*"))
    }
