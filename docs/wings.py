"""Writes the drawing and the table of wings in CONTRIBUTING.md, from the imports and docstrings.

python -m docs.wings
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.import_graph import PACKAGE, ROOT, imports, modules

HALVES = ("toolkit", "entrypoints")
BEGIN, END = "<!-- wings: make docs writes this -->\n", "<!-- end of wings -->\n"
ADAPTERS = "platforms.*"


def section() -> str:
    """Return the text between the marks."""
    parts = [f"```text\n{_drawing()}\n```\n", _table()]
    return "\n".join(parts)


def _wing(name: str) -> tuple[str, str]:
    """Return the folder and the wing of a module; the adapters of platforms are one leaf."""
    _, folder, *rest = (*name.split("."), "")
    is_adapter = folder == "toolkit" and rest[0] == "platforms" and len(rest) > 3
    return folder, ADAPTERS if is_adapter else rest[0]


def _levels(folder: str) -> list[list[str]]:
    """Return the wings of a folder, the highest level first."""
    graph: dict[str, set[str]] = {}
    for name in modules():
        own, wing = _wing(name)
        if own != folder or not wing or not (ROOT / folder / wing.partition(".")[0]).is_dir():
            continue
        used = {_wing(imported) for imported in imports(name) if imported.startswith(PACKAGE)}
        others = {other for half, other in used if half == folder and other}
        # The alarms of `runs` and `submit` name SageMaker; the other adapters are found by a table.
        graph.setdefault(wing, set()).update(others - {wing, ADAPTERS})
    sorter, levels = TopologicalSorter(graph), list[list[str]]()
    sorter.prepare()
    while sorter.is_active():
        ready = sorter.get_ready()
        levels.insert(0, sorted(wing for wing in ready if wing in graph))
        sorter.done(*ready)
    return [level for level in levels if level]


def _drawing() -> str:
    columns = [[" · ".join(level) for level in _levels(folder)] for folder in HALVES]
    height = max(map(len, columns))
    rows = [("toolkit (a laptop)", "entrypoints (a job)")]
    padded = [[""] * (height - len(column)) + column for column in columns]
    rows += list(zip(*padded, strict=True))
    width = max(len(left) for left, _ in rows) + 4
    return "\n".join(f"{left:<{width}}{right}".rstrip() for left, right in rows)


def _table() -> str:
    lines = ["| wing | on a laptop | in a job |", "|---|---|---|"]
    subjects = {folder: _subjects(folder) for folder in HALVES}
    for wing in sorted({wing for found in subjects.values() for wing in found}):
        cells = " | ".join(subjects[folder].get(wing, "") for folder in HALVES)
        lines.append(f"| `{wing}` | {cells} |")
    return "\n".join(lines) + "\n"


def _subjects(folder: str) -> dict[str, str]:
    """Return the first sentence of each wing of a folder."""
    texts = {
        path.parent.name: ast.get_docstring(ast.parse(path.read_text())) or ""
        for path in (ROOT / folder).glob("*/__init__.py")
    }
    return {
        wing: " ".join(text.partition("\n\n")[0].split()).replace("``", "`")
        for wing, text in texts.items()
    }


def written(text: str) -> str:
    """Return CONTRIBUTING.md with the section as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


def main() -> None:
    path = Path(ROOT / "CONTRIBUTING.md")
    path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
