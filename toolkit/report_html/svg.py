"""Matplotlib's drawings as SVG inside a page: its colours, its fonts, and ids of their own.

A drawing is made in inks, which are names of the page's CSS custom properties: what colour they
have is for the style sheet to say, in light and in dark.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = 6
"""So many curves can be told apart by colour."""

PARTS = (
    "useful",
    "training",
    "start_up",
    "restarts",
    "lost_work",
    "stalls",
    "checkpoints",
    "evaluation",
    "data_wait",
    "shut_down",
    "warm_pool",
    "storage",
    "requests",
    "logs",
)
"""What time or dollars go into."""

INKS = (
    "text",
    "muted",
    "rule",
    "bad",
    *(f"line-{place + 1}" for place in range(LINES)),
    *(f"part-{part}" for part in PARTS),
)
"""The custom properties of templates/page.css that a drawing may use."""


def ink(name: str) -> str:
    """What matplotlib takes for the colour that the style sheet calls ``--name``."""
    return f"#{INKS.index(name) + 1:06x}"


def inline_svg(
    name: str, label: str, inches: tuple[float, float], paint: Callable[[Axes], None]
) -> str:
    """What ``paint`` draws on axes of this size, as an element for a page.

    ``name`` begins each of its ids and must be the page's only one; ``label`` says what is to be
    seen to who cannot see it. The same drawing gives the same text.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError(
            '--html: needs matplotlib; pip install "sm-train[report]" brings it'
        ) from None
    text = io.StringIO()
    with mpl.rc_context(_style(name)):
        figure = Figure(figsize=inches, layout="constrained")
        paint(figure.subplots())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing, transparent=True)
    return _tidy(text.getvalue(), name, label)


def _style(name: str) -> dict[Any, Any]:
    return {
        # Reproducible identifiers.
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        # Names come from outside; a dollar sign is a dollar sign.
        "text.parse_math": False,
        "text.color": ink("text"),
        "axes.edgecolor": ink("rule"),
        "axes.labelcolor": ink("muted"),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "grid.color": ink("rule"),
        "grid.linewidth": 0.6,
        "xtick.color": ink("rule"),
        "ytick.color": ink("rule"),
        "xtick.labelcolor": ink("muted"),
        "ytick.labelcolor": ink("muted"),
        "patch.edgecolor": "none",
        "lines.solid_joinstyle": "round",
    }


def _tidy(text: str, name: str, label: str) -> str:
    """Without what only a file of its own needs: name spaces, style, fonts, digits, white space."""
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    root = ET.fromstring(text.replace("xlink:href=", "href="))
    for place in [one for one in root.iter("defs") if one.find("style") is not None]:
        root.remove(place)
    used = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", text))
    for element in root.iter():
        attributes = element.attrib
        element.text = (element.text or "").strip() if element.tag == "text" else None
        element.tail = None
        if "id" in attributes and not (attributes["id"] in used or attributes["id"][0] == "_"):
            # Matplotlib's names of its own parts; those that a drawing gives begin with "_".
            del attributes["id"]
        for key, value in attributes.items():
            attributes[key] = _attribute(key, value, name)
    root.attrib = {
        "class": "drawing",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": label,
    }
    return ET.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value.removeprefix('_')}"
    if key == "d":
        return " ".join(_rounded(value).split())
    if key == "style":
        value = re.sub(r"font(-size|-family)?: [^;]*(; )?", "", value)
        value = re.sub(r"#([0-9a-f]{6})\b", _property, value)
    if key in ("x", "y", "width", "height", "transform"):
        value = _rounded(value)
    return re.sub(r"^(url\()?#", rf"\1#{name}-", value)


def _rounded(coordinates: str) -> str:
    """To a tenth of a point, which no screen shows."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}", coordinates)


def _property(found: re.Match[str]) -> str:
    place = int(found[1], 16) - 1
    return f"var(--{INKS[place]})" if 0 <= place < len(INKS) else found[0]
