"""Training sees the colors that a browser shows, whatever states them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from sm_train.entrypoints.data_prep.packing.reencode import is_convertible, reencode
from sm_train.entrypoints.images.image_decoder import DecodeSpec
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR

from tests.support.images.color_pictures import PATCH, SIDE, browser_pictures, centers

if TYPE_CHECKING:
    from selenium import webdriver

pytestmark = pytest.mark.integration

MEAN_LEVELS = 2.0

PAGE = """<!DOCTYPE html><script>
const read = async (url) => {
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext('2d', {colorSpace: 'srgb'});
  context.fillStyle = 'white';
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0);
  return Array.from(context.getImageData(0, 0, canvas.width, canvas.height).data);
};
</script>"""


def loaded(content: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the pixels that training gets of a file, which is packed as JPEG if it has to be."""
    if is_convertible(content):
        content = reencode(content, None, 100, DEFAULT_COLOR)
    out = torch.empty((SIDE * PATCH, SIDE * PATCH, 3), dtype=torch.uint8)
    DecodeSpec(SIDE * PATCH, SIDE * PATCH).decode(content, out)
    return out.numpy()


def test_training_sees_the_colors_of_a_browser(browser: webdriver.Chrome, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    browser.get((tmp_path / "page.html").as_uri())
    off = {}
    for name, content in browser_pictures().items():
        kinds = {b"\xff\xd8": "jpeg", b"\x89P": "png", b"RI": "webp"}
        url = f"data:image/{kinds.get(content[:2], 'avif')};base64,"
        shown = browser.execute_async_script(
            "const done = arguments[arguments.length - 1]; read(arguments[0]).then(done);",
            url + base64.b64encode(content).decode(),
        )
        pixels = np.array(shown, np.uint8).reshape(SIDE * PATCH, SIDE * PATCH, 4)[..., :3]
        off[name] = float(np.abs(centers(loaded(content)) - centers(pixels)).mean())
    assert {name: levels for name, levels in off.items() if levels > MEAN_LEVELS} == {}
