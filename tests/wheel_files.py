"""Builds the wheel of this checkout, and environments that have only some packages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDERS = ("toolkit", "estimators", "cost", "entrypoints")


def tracked_files() -> list[str]:
    """Return the tracked files from which the wheel is built."""
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS, "setup.cfg", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.splitlines()


def build_wheel(folder: Path) -> Path:
    """Build the wheel below ``folder`` from a copy of the tracked files alone."""
    source, built = folder / "source", folder / "dist"
    for name in tracked_files():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    subprocess.run(
        [
            *[sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"],
            *["--no-build-isolation", "--disable-pip-version-check", "-w", built, source],
        ],
        check=True,
    )
    [path] = built.glob("*.whl")
    return path


def requirements(*extras: str) -> list[str]:
    """Return the requirements of an installation with ``extras``."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    sections = [parser["options"]["install_requires"]]
    sections += [parser["options.extras_require"][extra] for extra in extras]
    lines = "\n".join(sections).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def install(wheel: Path, folder: Path, *extras: str) -> Path:
    """Make an environment with the wheel and links to this environment's packages of ``extras``.

    Return its interpreter. No package outside of the base requirements and ``extras`` can be
    imported.
    """
    venv.create(folder, with_pip=False)
    [site] = (folder / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    [metadata] = site.glob("sm_train-*.dist-info")
    origin = {"url": wheel.as_uri(), "archive_info": {}}
    (metadata / "direct_url.json").write_text(json.dumps(origin))  # as pip writes it
    for name in _closure(requirements(*extras)):
        installed = distribution(name)
        for file in installed.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(installed.locate_file(top))))
    return folder / "bin" / "python"


def _closure(requirements: list[str]) -> set[str]:
    """Return the names of the distributions that ``requirements`` install."""
    found: set[str] = set()
    pending = requirements
    while pending:
        requirement = Requirement(pending[0])
        pending = pending[1:]
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name in found or not is_needed:
            continue
        try:
            pending = [*pending, *(distribution(name).requires or ())]
        except PackageNotFoundError:
            continue
        found.add(name)
    return found
