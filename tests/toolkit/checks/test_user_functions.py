"""Functions that the run file names are looked up before a job imports them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sm_train.toolkit.checks.user_functions import user_function_findings

from tests.support.run_documents import ECR, config

SOURCE = """
from functools import partial

import torch

if torch.__version__ > "2.5":
    def huber(prediction, target): ...

cosine = partial(max, 1)
from losses_of_others import charbonnier as robust
"""


def found(folder: Path, code: str | None = "code", **settings: Any) -> list[tuple[str, str, str]]:
    (folder / "code" / "nested").mkdir(parents=True, exist_ok=True)
    (folder / "code" / "losses.py").write_text(SOURCE)
    (folder / "code" / "nested" / "__init__.py").write_text("class Lion: ...")
    (folder / "code" / "broken.py").write_text("def x(:")
    run = config(code=code, training=settings)
    return [
        (finding.level, finding.where, finding.message)
        for finding in user_function_findings(run, folder)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "losses:huber"},
        {"objective": "losses:robust", "lr_schedule": "losses:cosine"},
        {"optimizer": "nested:Lion"},
        {"optimizer": "torch.optim:NAdam"},
        {"optimizer": "transformers.optimization:Adafactor"},
    ],
)
def test_functions_that_exist_are_not_reported(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert found(tmp_path, **settings) == []


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        ({"objective": "losses:hubber"}, "training.objective", "losses.py defines no hubber"),
        ({"optimizer": "lion:Lion"}, "training.optimizer.name", "no module lion in the folder"),
        ({"lr_schedule": "broken:x"}, "training.lr_schedule.name", "broken.py:1: "),
    ],
)
def test_missing_functions_are_errors(
    tmp_path: Path, settings: dict[str, Any], where: str, message: str
) -> None:
    [(level, key, text)] = found(tmp_path, **settings)
    assert (level, key) == ("error", where)
    assert message in text


def test_a_module_of_a_package_or_image_is_a_warning(tmp_path: Path) -> None:
    run = config(
        training={"optimizer": "lion_pytorch:Lion"},
        cluster={"instance_type": "ml.p5.48xlarge", "image": ECR},
    )
    assert [finding.level for finding in user_function_findings(run, tmp_path)] == ["warning"]
    found(tmp_path)
    (tmp_path / "code" / "requirements.txt").write_text("lion-pytorch==0.2.3\n")
    assert found(tmp_path, optimizer="lion_pytorch:Lion") == []
