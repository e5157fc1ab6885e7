"""Counts the statements of the product by wing, without docstrings.

make statements
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from sm_train.toolkit.base.wings import WINGS

from tests.support.import_graph import ROOT, modules

OPTIONAL = (*WINGS, "manifests")
"""Wings that an installation may lack, with the manifests of `clusters`."""


def statements(path: Path) -> int:
    """Return the statements of a file, at any depth; a docstring is none."""
    return sum(
        isinstance(node, ast.stmt) and not _is_docstring(node)
        for node in ast.walk(ast.parse(path.read_text()))
    )


def _is_docstring(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def main() -> None:
    """Print a row for each wing, the sum, and the sum of what no installation lacks."""
    counts, files, core = Counter[str](), Counter[str](), 0
    for path in modules().values():
        relative = path.relative_to(ROOT)
        folder, *rest = relative.parts
        wing = rest[0] if len(rest) > 1 else folder
        count = statements(path)
        counts[wing] += count
        files[wing] += 1
        core += count * (wing not in OPTIONAL)
    for wing, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{wing:<20}{count:>8,}{files[wing]:>6} files")
    print(f"{'all':<20}{counts.total():>8,}{files.total():>6} files")
    print(f"{'core and face':<20}{core:>8,}")


if __name__ == "__main__":
    main()
