"""Simulates an image that lacks some of this environment's packages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

RESTRICT_IMPORTS = """
import sys
from importlib import metadata
from importlib.abc import MetaPathFinder
from packaging.requirements import Requirement

def normalized(name):
    return name.lower().replace("_", "-")

def closure(name, found):
    if normalized(name) not in found:
        found.add(normalized(name))
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                closure(requirement.name, found)
    return found

allowed = set()
for name in sys.argv[1].split():
    closure(name, allowed)
owners = metadata.packages_distributions()

class RestrictedFinder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in owners and top != "sm_train" and not allowed & set(map(normalized, owners[top])):
            raise ImportError(f"{name} is not in the image")

for name in [n for n in sys.modules if n.partition(".")[0] in owners]:
    del sys.modules[name]
sys.meta_path.insert(0, RestrictedFinder())
"""
"""Prelude of a program that lets it import only the distributions named in its first argument and
their dependencies.
"""


def lambda_packages(dockerfile: str) -> list[str]:
    """Return the names of the packages that the Dockerfile of a Lambda function installs."""
    [path] = re.findall(r"COPY (\S+) /tmp/requirements.txt\n", dockerfile)
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return [line.partition("==")[0] for line in lines if "==" in line]
