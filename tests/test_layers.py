"""Imports point one way: toolkit → estimators → cost, and entrypoints imports none of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "toolkit": {"toolkit", "estimators", "cost", "entrypoints"},
    "estimators": {"estimators", "cost"},
    "cost": {"cost"},
    "entrypoints": {"entrypoints"},
}


SHARED = "sm_train.entrypoints.common"
"""What `estimators` may import of `entrypoints`: the job configuration that both ends share."""


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_imports_point_down(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        names = {name for name in imported(path) if name.startswith("sm_train.")}
        if layer == "estimators":
            names = {name for name in names if not name.startswith(f"{SHARED}.")}
        ours = {name.split(".")[1] for name in names}
        assert ours <= MAY_IMPORT[layer], path


def test_cost_is_standard_library_only() -> None:
    import sys

    for path in (ROOT / "cost").rglob("*.py"):
        others = {name.split(".")[0] for name in imported(path)} - {"sm_train"}
        assert others <= sys.stdlib_module_names, path


@pytest.mark.parametrize(
    "module",
    [
        "common.events",
        "common.sagemaker_paths",
        "common.job_config",
        "data.shard_format",
        "data.shard_index",
        "packing.describe_shard",
        "packing.pack",
        "packing.lambda_handler",
        "packing.processing_job",
        "doctor.verdict",
        "doctor.history",
        "doctor.report",
        "doctor.start",
        "monitoring.start",
        "monitoring.watchdog",
    ],
)
def test_what_a_laptop_shares_and_what_watches_needs_no_torch(module: str) -> None:
    import subprocess
    import sys

    program = f"import sys, sm_train.entrypoints.{module}\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "boto3", "diffusers"} & set(loaded)
