"""PyTorch's settings on a GPU, as far as they can be read without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sm_train.entrypoints.job_interface.job_config import JobConfig, read_job_config
from sm_train.entrypoints.training.gpu_settings import (
    allocator_variable,
    configure_kernels,
    set_allocator,
)

from tests.support.cluster.training_jobs import tiny_run
from tests.support.run_documents import write_job_file


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    return read_job_config(write_job_file(tmp_path, tiny_run(max_steps=1)), "8px")


@pytest.fixture
def flags() -> Iterator[Any]:
    """Return a function that reads the settings, which belong to the process."""

    def read() -> tuple[str, bool, bool]:
        cudnn = torch.backends.cudnn
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark

    matmul, allow_tf32, benchmark = read()
    yield read
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = allow_tf32, benchmark


@pytest.mark.parametrize(
    ("precision", "matmul", "tf32"),
    [("bf16", "high", True), ("tf32", "high", True), ("fp32", "highest", False)],
)
def test_fp32_is_the_only_precision_without_tf32(
    config: JobConfig, flags: Any, precision: str, matmul: str, *, tf32: bool
) -> None:
    training = replace(config.training, precision=precision)  # type: ignore[arg-type]
    configure_kernels(replace(config, training=training))
    assert flags()[:2] == (matmul, tf32)


@pytest.mark.parametrize("aspect_buckets", [False, True])
def test_convolutions_are_benchmarked_where_their_shapes_repeat(
    config: JobConfig, flags: Any, *, aspect_buckets: bool
) -> None:
    configure_kernels(replace(config, data=replace(config.data, aspect_buckets=aspect_buckets)))
    assert flags()[2] == (not aspect_buckets)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.3.0", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.8.1+cu128", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.0", "PYTORCH_ALLOC_CONF"),
        ("2.13.0+cpu", "PYTORCH_ALLOC_CONF"),
        ("3.0.0", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_allocator_variable_follows_pytorchs_name(version: str, name: str) -> None:
    assert allocator_variable(version) == name


def test_segments_are_expandable_unless_the_run_file_or_mpi_says_otherwise() -> None:
    environment: dict[str, str] = {}
    set_allocator(environment)
    assert environment == {allocator_variable(torch.__version__): "expandable_segments:True"}
    for given in (
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
        {"PYTORCH_ALLOC_CONF": ""},
        # SMDDP's processes.
        {"OMPI_COMM_WORLD_SIZE": "16"},
    ):
        unchanged = dict(given)
        set_allocator(unchanged)
        assert unchanged == given
