"""Write watch.svg and review.png (`make docs`): the real views, of example jobs from the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from sm_train.toolkit.analysis.review.review_model import Review
from sm_train.toolkit.analysis.review.review_page import page
from sm_train.toolkit.runs.watch.screen import screen

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from tests.support.sample_reviews import healthy, stalled
from tests.toolkit.runs.watch.screen_support import NOW, cluster, model

COLUMNS = 100


def write_watch() -> None:
    """Render the live view of a cluster of four nodes."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, color_system="truecolor")
        console.print("[bold]$ sm-train watch demo[/]")
        console.print(screen(model(cluster(4, warnings=0), 4), NOW.timestamp(), COLUMNS))
    svg = console.export_svg(title="sm-train", unique_id="watch")
    # The fonts that rich links to would be fetched from another site: use the reader's own.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    Path(__file__).with_name("watch.svg").write_text(svg, encoding="utf-8")


def write_review() -> None:
    """Take a picture of the top of a review page in Chromium."""
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("review.png: chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "review.html")
        path.write_text(page(Review((healthy(4), stalled()))), encoding="utf-8")
        target = Path(__file__).with_name("review.png")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,760"]
        subprocess.run(
            [browser, *options, f"--screenshot={target}", path.as_uri()],
            check=True,
            capture_output=True,
        )
    from PIL import Image

    # 64 colors are enough for text and charts, and a fifth of the bytes.
    with Image.open(target) as picture:
        picture.convert("RGB").quantize(64).save(target, optimize=True)


if __name__ == "__main__":
    write_watch()
    write_review()
