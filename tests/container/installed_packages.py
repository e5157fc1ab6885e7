"""Lists the files of installed packages and of their dependencies, as paths relative to ``lib``.

The argument is a requirements file; :data:`_BASE_PACKAGES` are listed in addition.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_BASE_PACKAGES = ["torch", "numpy", "pillow", "pip"]


def closure(names: list[str]) -> set[str]:
    """Return ``names`` and all their dependencies in this environment."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = canonicalize_name(pending.pop())
        if name in found:
            continue
        found.add(name)
        requirements = [Requirement(line) for line in distribution(name).requires or ()]
        pending += [
            requirement.name
            for requirement in requirements
            if not requirement.marker or requirement.marker.evaluate({"extra": ""})
        ]
    return found


def main() -> None:
    lines = Path(sys.argv[1]).read_text().splitlines()
    required = [Requirement(line).name for line in lines if line and not line.startswith("#")]
    for name in sorted(closure(required + _BASE_PACKAGES)):
        for file in distribution(name).files or ():
            # Skip scripts: their first line names this environment's interpreter.
            if ".." not in file.parts and Path(str(file.locate())).is_file():
                print(f"python3.11/site-packages/{file}")


if __name__ == "__main__":
    main()
