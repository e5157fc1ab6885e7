"""Makes an image's CUDA run on a host whose NVIDIA driver is older than it needs.

CUDA 13 needs driver 580 and CUDA 12 driver 525 (NVIDIA, CUDA Compatibility, table 1). AWS does not
publish the drivers of SageMaker's training hosts. Its images include NVIDIA's forward-compatibility
libraries, but the script that would enable them does not affect training: SageMaker's images run it
in a subshell (aws/deep-learning-containers, start_with_right_hostname.sh, 2026-08). AWS tests the
images of PyTorch 2.11 to 2.13 as training jobs on ml.g4dn.12xlarge without it, so the driver there
is new enough (test/pytorch/integration/sagemaker/test_sm_training_cuda.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_COMPAT_FOLDER = Path("/usr/local/cuda/compat")

# Branch of the driver that came with each major version of CUDA → the oldest that runs it.
_MINIMUM_BRANCHES = (580, 525, 450)


@dataclass(frozen=True)
class CudaCompat:
    """Variables for the training processes, and a line about them for the log."""

    environment: dict[str, str]
    message: str


def cuda_compat(
    environment: Mapping[str, str],
    driver_file: Path = _DRIVER_FILE,
    compat_folder: Path = _COMPAT_FOLDER,
) -> CudaCompat | None:
    """Return what enables the forward-compatibility libraries; None where they are not needed.

    With a driver of the same CUDA major version, the host's own libraries are used: they are the
    ones that match its kernel module.
    """
    host = _host_driver(driver_file)
    library = compat_folder / "libcuda.so.1"
    if host is None or not library.is_symlink():
        return None
    image = library.readlink().name.removeprefix("libcuda.so.")
    minimum = next((branch for branch in _MINIMUM_BRANCHES if _branch(image) >= branch), 0)
    if _branch(host) >= minimum:
        return None
    paths = [str(compat_folder), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    return CudaCompat(
        {"LD_LIBRARY_PATH": ":".join(paths)},
        f"the host's NVIDIA driver {host} is older than {minimum}, which the image's CUDA needs: "
        f"the image's compatibility libraries ({image}) are used",
    )


def _host_driver(file: Path) -> str | None:
    if not file.is_file():
        return None
    match = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d[\d.]*)\s", file.read_text())
    return match[1] if match else None


def _branch(version: str) -> int:
    return int(version.split(".")[0]) if version[:1].isdigit() else 0
