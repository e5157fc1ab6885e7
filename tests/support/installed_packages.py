"""Lists the files of installed packages and of what they need, as paths below ``lib``.

The argument is a requirements file; PyTorch and what it takes to run the file stand beside it.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ALSO = ["torch", "numpy", "pillow", "pip"]


def closure(names: list[str]) -> set[str]:
    """``names`` and everything that they depend on here."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        needs = [Requirement(line) for line in distribution(name).requires or ()]
        left += [
            need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})
        ]
    return found


def main() -> None:
    lines = Path(sys.argv[1]).read_text().splitlines()
    wanted = [Requirement(line).name for line in lines if line and not line.startswith("#")]
    for name in sorted(closure(wanted + _ALSO)):
        for file in distribution(name).files or ():
            # Scripts name the environment's own interpreter.
            if ".." not in file.parts and Path(str(file.locate())).is_file():
                print(f"python3.11/site-packages/{file}")


if __name__ == "__main__":
    main()
