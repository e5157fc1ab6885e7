"""Settings of PyTorch on a GPU, each with its reason."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib.metadata import version

from sm_train.entrypoints.job_interface.job_config import JobConfig, major_minor

_ALLOCATOR = "expandable_segments:True"


def allocator_variable(torch_version: str) -> str:
    """Return the name of the variable that configures PyTorch's allocator.

    PyTorch 2.9 renamed it and warns about the old name, ``PYTORCH_CUDA_ALLOC_CONF``.
    """
    renamed = major_minor(torch_version) >= (2, 9)
    return "PYTORCH_ALLOC_CONF" if renamed else "PYTORCH_CUDA_ALLOC_CONF"


def set_allocator(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the allocator extend segments; call it before PyTorch is imported.

    Blocks of other sizes (aspect buckets, the last batch of an evaluation, FSDP2's gathered blocks)
    otherwise leave gaps that no later block fits into. What ``cluster.environment`` sets takes
    precedence. Under MPI, which starts SMDDP's processes, nothing is set: memory of such segments
    cannot be shared between processes (PyTorch issue 130330), and whether SMDDP does is unknown.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if "OMPI_COMM_WORLD_SIZE" in environment or any(name in environment for name in names):
        return
    environment[allocator_variable(version("torch"))] = _ALLOCATOR


def configure_kernels(config: JobConfig) -> None:
    """Choose the arithmetic of fp32 kernels and the algorithms of convolutions.

    - TF32 rounds the inputs of fp32 products to 10 bits of mantissa and runs on tensor cores: on an
      A100 at 156 instead of 19.5 TFLOP/s (NVIDIA's data sheet). It is enabled for ``tf32``, and for
      ``bf16``, whose products round more. ``fp32`` disables it for convolutions too, for which
      PyTorch enables it by default.
    - cuDNN measures its convolution algorithms once for each shape and keeps the fastest. With
      aspect buckets it is off: each rank would measure a new shape at another step, and all ranks
      would wait for it.
    """
    import torch

    tf32 = config.training.precision != "fp32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = not config.data.aspect_buckets
