"""A page on which people say, prompt by prompt, which of two images is better.

How often one model's images win over another's on the same prompts is how text-to-image models are
judged (PartiPrompts: Yu et al., arXiv 2206.10789). The page is one file: images, style and script
are in it. Which side an image stands on is drawn for each prompt, and said after the last one.
"""

from __future__ import annotations

import base64
import html
import io
import json
import random
from collections.abc import Sequence
from importlib.resources import files
from typing import Any


def comparison_page(
    names: tuple[str, str],
    prompts: Sequence[str],
    images: tuple[Sequence[Any], Sequence[Any]],
    seed: int,
) -> str:
    """The HTML of ``images`` (PIL), of both models one for each prompt."""
    sides = random.Random(seed)
    pairs = []
    for prompt, first, second in zip(prompts, *images, strict=True):
        swapped = sides.random() < 0.5
        left, right = (second, first) if swapped else (first, second)
        pairs.append(
            {"prompt": prompt, "left": _data(left), "right": _data(right), "swapped": swapped}
        )
    # A script ends at the first "</", wherever it stands.
    document = json.dumps({"names": names, "pairs": pairs}).replace("</", "<\\/")
    template = (files("sm_train.toolkit") / "templates" / "compare.html").read_text("utf-8")
    title = html.escape(f"{len(pairs)} pairs to judge")
    return template.replace("{{title}}", title).replace("{{document}}", document)


def _data(image: Any) -> str:
    """As WebP without loss: nothing but the models shall differ."""
    content = io.BytesIO()
    image.save(content, "WEBP", lossless=True)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()
