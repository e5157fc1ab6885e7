"""``train.py`` whose decoders crash on some images; run from a copy in the bundle.

The loader's processes import it again, so they crash on the same images.
"""

from __future__ import annotations

import ctypes
from typing import Any

from sm_train.entrypoints.images import image_decoder
from sm_train.entrypoints.training import train

CRASH = b"crash this decoder"

_decode = image_decoder._decode


def _crash_or_decode(content: Any, *arguments: Any, **options: Any) -> Any:
    if CRASH in bytes(content):
        ctypes.string_at(0)
    return _decode(content, *arguments, **options)


image_decoder._decode = _crash_or_decode

if __name__ == "__main__":
    train.main()
