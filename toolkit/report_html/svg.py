"""Embeds matplotlib plots as SVG in an HTML page, with the page's colors and fonts.

A plot is drawn in placeholder colors that stand for the page's CSS custom properties: the style
sheet defines the actual colors for the light and the dark theme.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.base.extras import require_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = 6
"""Number of curves with distinguishable colors."""

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
    "uploads",
    "requests",
    "logs",
)
"""Categories of time and cost."""

COLORS = (
    "text",
    "muted",
    "rule",
    "bad",
    *(f"line-{index + 1}" for index in range(LINES)),
    *(f"part-{part}" for part in PARTS),
)
"""The custom properties of templates/page.css that a plot may use."""


def css_color(name: str) -> str:
    """Return the placeholder color for the custom property ``--name``."""
    return f"#{COLORS.index(name) + 1:06x}"


def inline_svg(
    name: str, label: str, inches: tuple[float, float], draw: Callable[[Axes], None]
) -> str:
    """Return the plot that ``draw`` draws on axes of this size as an SVG element.

    ``name`` prefixes its element IDs and must be unique in the page; ``label`` is the alt text.
    The same plot always gives the same text.

    Raises:
        UserError: matplotlib is not installed.
    """
    require_extra("report", "matplotlib", purpose="a page with charts")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    text = io.StringIO()
    with mpl.rc_context(_style(name)):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure.subplots())
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=no_metadata, transparent=True)
    return _minify(text.getvalue(), name, label)


def _style(name: str) -> dict[Any, Any]:
    return {
        # Reproducible identifiers.
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        # Names are user input, so dollar signs must not start math text.
        "text.parse_math": False,
        "text.color": css_color("text"),
        "axes.edgecolor": css_color("rule"),
        "axes.labelcolor": css_color("muted"),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "grid.color": css_color("rule"),
        "grid.linewidth": 0.6,
        "xtick.color": css_color("rule"),
        "ytick.color": css_color("rule"),
        "xtick.labelcolor": css_color("muted"),
        "ytick.labelcolor": css_color("muted"),
        "patch.edgecolor": "none",
        "lines.solid_joinstyle": "round",
    }


def _minify(text: str, name: str, label: str) -> str:
    """Remove what only a standalone SVG needs: namespaces, style, fonts, digits, white space."""
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    root = ET.fromstring(text.replace("xlink:href=", "href="))
    for definitions in [defs for defs in root.iter("defs") if defs.find("style") is not None]:
        root.remove(definitions)
    referenced = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", text))
    for element in root.iter():
        attributes = element.attrib
        element.text = (element.text or "").strip() if element.tag == "text" else None
        element.tail = None
        if "id" in attributes and not (
            attributes["id"] in referenced or attributes["id"][0] == "_"
        ):
            # An ID of matplotlib's own parts; those set by a plot begin with "_".
            del attributes["id"]
        for key, value in attributes.items():
            attributes[key] = _attribute(key, value, name)
    root.attrib = {
        "class": "plot",
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
        value = re.sub(r"#([0-9a-f]{6})\b", _css_variable, value)
    if key in ("x", "y", "width", "height", "transform"):
        value = _rounded(value)
    return re.sub(r"^(url\()?#", rf"\1#{name}-", value)


def _rounded(coordinates: str) -> str:
    """Round to a tenth of a point, below what a screen resolves."""
    return re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}", coordinates)


def _css_variable(match: re.Match[str]) -> str:
    """Replace a placeholder color by its custom property."""
    index = int(match[1], 16) - 1
    return f"var(--{COLORS[index]})" if 0 <= index < len(COLORS) else match[0]
