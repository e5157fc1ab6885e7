"""The image's CUDA runs on hosts with older NVIDIA drivers."""

from __future__ import annotations

from pathlib import Path

import pytest
from sm_train.entrypoints.distributed.cuda_compat import cuda_compat

# As drivers write the file: the proprietary kernel module, and the open one.
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Aug 14 10:00:00 UTC 2026\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@host)\n"


def host(folder: Path, line: str, compat: str | None) -> tuple[Path, Path]:
    driver, libraries = folder / "version", folder / "compat"
    driver.write_text(line + "GCC version:  gcc version 11.4.0\n")
    libraries.mkdir()
    if compat:
        (libraries / "libcuda.so.1").symlink_to(f"libcuda.so.{compat}")
    return driver, libraries


@pytest.mark.parametrize("line", [PROPRIETARY, OPEN])
@pytest.mark.parametrize(
    ("driver", "compat", "minimum"),
    [
        ("570.172.08", "580.95.05", 580),  # CUDA 13.0
        ("570.172.08", "610.43.02", 580),  # CUDA 13.3
        ("580.95.05", "610.43.02", None),  # the same major version of CUDA
        ("595.91.07", "580.95.05", None),
        ("470.256.02", "550.54.15", 525),  # CUDA 12.4, the images with SMDDP
        ("535.183.01", "550.54.15", None),
        ("470.256.02", None, None),
    ],
)
def test_compatibility_libraries_are_used_below_the_minimum_driver(
    tmp_path: Path, line: str, driver: str, compat: str | None, minimum: int | None
) -> None:
    files = host(tmp_path, line.format(driver), compat)
    result = cuda_compat({"LD_LIBRARY_PATH": "/opt/amazon/efa/lib"}, *files)
    assert (result is not None) == (minimum is not None)
    if result is not None:
        path = result.environment["LD_LIBRARY_PATH"]
        assert path == f"{tmp_path}/compat:/opt/amazon/efa/lib"
        assert f"driver {driver} is older than {minimum}" in result.message


def test_no_gpu_needs_nothing(tmp_path: Path) -> None:
    assert cuda_compat({}, tmp_path / "none", tmp_path) is None
    (tmp_path / "version").write_text("unreadable\n")
    assert cuda_compat({}, tmp_path / "version", tmp_path) is None


def test_empty_library_path_gets_no_empty_entry(tmp_path: Path) -> None:
    """An empty entry would be the working directory."""
    files = host(tmp_path, PROPRIETARY.format("550.90.07"), "580.95.05")
    result = cuda_compat({}, *files)
    assert result is not None
    assert result.environment == {"LD_LIBRARY_PATH": f"{tmp_path}/compat"}
