"""Helpers of the tests of user packages, which other tests use as well."""

from __future__ import annotations

import zipfile
from pathlib import Path


def write_wheel(folder: Path) -> Path:
    """Write a wheel of the package ``smtown`` with one module."""
    files = {
        "smtown.py": "VALUE = 7\n",
        "smtown-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: smtown\nVersion: 1.0\n",
        "smtown-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, "smtown-1.0.dist-info/RECORD"])
    path = folder / "smtown-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr("smtown-1.0.dist-info/RECORD", record)
    return path
