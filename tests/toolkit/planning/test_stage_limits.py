"""What limits a stage, and the change that saves most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.support.run_documents import stage
from tests.support.run_files import write_run


def limit(cli: Cli, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    run = write_run(tmp_path, **changes)
    [found] = json.loads(cli("cost", run, "--json").stdout)["stages"]
    value: dict[str, Any] = found["limit"]
    return value


def test_shares_sum_to_one_and_name_the_largest(cli: Cli, tmp_path: Path) -> None:
    found = limit(cli, tmp_path)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["shares"][found["resource"]] == max(found["shares"].values())


def test_the_saving_is_what_the_change_saves(cli: Cli, tmp_path: Path) -> None:
    """The proposed change, made and priced, costs less by the dollars that were promised."""
    slow = stage("256px", max_steps=500_000, steps_per_second=None, gradient_accumulation_steps=1)
    run = write_run(tmp_path, stages=[slow])
    before = json.loads(cli("cost", run, "--json").stdout)
    found = before["stages"][0]["limit"]
    assert found["speedup"] > 1.1
    changed = cli("cost", run, "--json", "--set", found["change"].replace(": ", "="))
    after = json.loads(changed.stdout)
    saved = before["total"]["cost_usd"] - after["total"]["cost_usd"]
    assert found["saved_usd"] == pytest.approx(saved, rel=1e-6)
    # The next proposal is another one.
    assert after["stages"][0]["limit"]["change"] != found["change"]


def test_a_slow_network_is_the_limit_of_a_large_model(cli: Cli, tmp_path: Path) -> None:
    found = limit(
        cli,
        tmp_path,
        model={"preset": "mmdit-20b"},
        stages=[
            stage(
                "512px",
                resolution=512,
                instances=16,
                per_device_batch_size=1,
                gradient_accumulation_steps=1,
                steps_per_second=None,
                sharding="full_shard",
                activation_checkpointing=True,
            )
        ],
    )
    assert found["resource"] == "network"
    assert found["change"].startswith("stages.512px.sharding: ")


def test_a_script_of_ones_own_gets_no_proposal(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    found = limit(cli, tmp_path, code="code", entry="train.py")
    assert found["change"] is None


def test_explain_and_check_name_limit_and_change(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, stages=[stage("256px", max_steps=500_000)])
    explained = " ".join(cli("cost", run, "--explain").stdout.split())
    assert "What limits each stage - 256px is limited by" in explained
    findings = json.loads(cli("check", run, "--offline", "--json").stdout)["findings"]
    [found] = [finding for finding in findings if finding["code"] == "step-limit"]
    assert found["level"] == "info"
    assert "256px is limited by" in found["message"]
    assert " × as fast and to save $" in found["fix"]
