"""The modules of the product and their imports, from their syntax trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "sm_train"
FOLDERS = ("toolkit", "estimators", "cost", "entrypoints")

PUBLIC_API = "sm_train.entrypoints.api"
"""``import sm_train``: names also what only a laptop has, for type checkers; it imports it lazily,
and a job's bundle holds nothing of it."""


def module_name(path: Path) -> str:
    """``toolkit/records/job_logs.py`` → ``sm_train.toolkit.records.job_logs``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    return {
        module_name(path): path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


@cache
def imports(name: str) -> frozenset[str]:
    """What a module imports, at its top or inside functions; ``from package import module`` too."""
    found = set()
    tree = ast.parse(modules()[name].read_text())
    if name == PUBLIC_API:
        tree.body = [node for node in tree.body if not is_for_type_checkers(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            source = node.module or ""
            for alias in node.names:
                module = f"{source}.{alias.name}"
                found.add(module if module in modules() else source)
    return frozenset(found)


def is_for_type_checkers(node: ast.stmt) -> bool:
    """Whether the statement is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
