"""Lists the files of installed packages and of their dependencies, as paths relative to ``lib``.

installed_packages.py [NAME…] -r REQUIREMENTS
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(names: list[str]) -> set[str]:
    """Return ``names`` and all their installed dependencies in this environment.

    Raises:
        PackageNotFoundError: one of ``names`` is not installed.
    """
    for name in names:
        distribution(name)
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = canonicalize_name(pending.pop())
        if name in found:
            continue
        try:
            requirements = [Requirement(line) for line in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue  # AWS's container toolkit is installed without some of its dependencies
        found.add(name)
        pending += [
            requirement.name
            for requirement in requirements
            if not requirement.marker or requirement.marker.evaluate({"extra": ""})
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("-r", "--requirements", type=Path, required=True)
    options = parser.parse_args()
    lines = options.requirements.read_text().splitlines()
    pinned = [Requirement(line.rstrip(" \\")) for line in lines if line[:1].isalpha()]
    required = [
        requirement.name
        for requirement in pinned
        if not requirement.marker or requirement.marker.evaluate()
    ]
    for name in sorted(closure(options.names + required)):
        for file in distribution(name).files or ():
            # Skip scripts: their first line names this environment's interpreter.
            if ".." not in file.parts and Path(str(file.locate())).is_file():
                print(f"python3.11/site-packages/{file}")


if __name__ == "__main__":
    main()
