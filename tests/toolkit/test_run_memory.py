"""A run file that was priced before is priced again at once, and never from an old reading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import Cli, clean_environment
from tests.estimators.runs import stage
from tests.toolkit.runs import write_run


def loaded(folder: Path) -> set[str]:
    program = (
        "import sys\nfrom sm_train.toolkit.cli import main\n"
        "try:\n    main(['cost', 'run.yaml', '--json'])\n"
        "finally:\n    print('LOADED', *sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=clean_environment(folder),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split("LOADED ")[1].split())


def test_the_second_pricing_needs_neither_pydantic_nor_yaml(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert {"pydantic", "yaml"} <= loaded(tmp_path)
    assert not {"pydantic", "yaml"} & loaded(tmp_path)


def test_both_pricings_say_the_same(cli: Cli, tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        stages=[stage("a"), stage("b", resolution=512, iterations_per_second=None)],
        cluster={"instance_type": "ml.p5.48xlarge", "capacity": "warm-pool", "keep_alive": "1h"},
        tags={"a b": "c"},
    )
    first, second = (cli("cost", run, "--json").stdout for _ in range(2))
    assert json.loads(first)["stages"]
    assert first == second


def test_an_edited_file_is_read_anew(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    before = json.loads(cli("cost", run, "--json").stdout)
    write_run(tmp_path, stages=[stage(iterations=2000)])
    after = json.loads(cli("cost", run, "--json").stdout)
    assert after["stages"][0]["iterations"] == 2 * before["stages"][0]["iterations"]
    run.write_text("name: 3")
    assert cli("cost", run).returncode == 2


def test_a_damaged_or_unwritable_memory_costs_the_time_alone(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    first = cli("cost", run, "--json")
    [memory] = (tmp_path / ".cache" / "sm-train" / "runs").iterdir()
    memory.write_text("{")
    assert cli("cost", run, "--json").stdout == first.stdout
    blocked = cli("cost", run, "--json", env={"XDG_CACHE_HOME": "/proc/nowhere"})
    assert blocked.returncode == 0, blocked.stderr
    assert blocked.stdout == first.stdout
