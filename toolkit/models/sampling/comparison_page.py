"""A page for blind pairwise comparison of two models' images.

Text-to-image models are compared by their win rate on the same prompts (PartiPrompts: Yu et al.,
arXiv 2206.10789). The page is self-contained: it holds images, style and script. The sides are
swapped at random for each prompt, and revealed after the last one.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
from collections.abc import Sequence
from typing import Any

from sm_train.toolkit.report_html.html_page import render, template


def comparison_page(
    names: tuple[str, str],
    prompts: Sequence[str],
    images: tuple[Sequence[Any], Sequence[Any]],
    seed: int,
) -> str:
    """Return the HTML for ``images`` (PIL): of each model, one for each prompt."""
    generator = random.Random(seed)
    pairs = []
    for prompt, first, second in zip(prompts, *images, strict=True):
        swapped = generator.random() < 0.5
        left, right = (second, first) if swapped else (first, second)
        pairs.append(
            {
                "prompt": prompt,
                "left": _data_url(left),
                "right": _data_url(right),
                "swapped": swapped,
            }
        )
    # "</" ends a script element even inside a string, and "<!--" hides the elements after it.
    document = json.dumps({"names": names, "pairs": pairs}).replace("<", "\\u003c")
    return render(
        "compare.html",
        title=f"{len(pairs)} pairs to judge",
        script_hash=_script_hash(template("compare.html")),
        document=document,
    )


def _script_hash(template: str) -> str:
    """Return the hash that lets the page's policy run the page's own script and no other."""
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _data_url(image: Any) -> str:
    """Encode as lossless WebP, so that compression does not affect the comparison."""
    content = io.BytesIO()
    image.save(content, "WEBP", lossless=True)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()
