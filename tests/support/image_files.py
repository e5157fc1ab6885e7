"""Real image files for the tests of packing."""

from __future__ import annotations

import io
import random
from pathlib import Path

from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (48, 32), kind: str = "JPEG") -> bytes:
    """An encoded image of coloured blocks, the same for the same arguments."""
    colours = random.Random(seed).randbytes(3 * 8 * 8)
    image = Image.frombytes("RGB", (8, 8), colours).resize(size, Image.Resampling.NEAREST)
    file = io.BytesIO()
    if kind == "MPO":  # with one image alone it would be a plain JPEG
        image.save(file, kind, save_all=True, append_images=[image])
    else:
        image.save(file, kind)
    return file.getvalue()


def write_pair(folder: Path, name: str, image: bytes, caption: str | bytes | None) -> Path:
    """Write an image and, beside it, its caption where there is one."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image)
    if caption is not None:
        content = caption.encode() if isinstance(caption, str) else caption
        path.with_suffix(".txt").write_bytes(content)
    return path


def album(folder: Path, count: int) -> Path:
    """A folder of ``count`` good pairs, some of them in a subfolder."""
    for number in range(count):
        place = "more/" if number % 3 == 2 else ""
        write_pair(folder, f"{place}{number:03}.jpg", picture(number), f"picture {number}")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` with its content, and empty folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"(folder)"
        for path in sorted(folder.rglob("*"))
    }
