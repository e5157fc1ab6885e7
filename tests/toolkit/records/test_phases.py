"""The tables of phases: what is billed, how long it takes, and what silence means."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import botocore.session
import pytest
from sm_train.toolkit.clusters.node_records.cluster_job import cluster_platform
from sm_train.toolkit.platforms.local.local_folder_run import LOCAL
from sm_train.toolkit.records.run_job import Platform
from sm_train.toolkit.records.training_job import SAGEMAKER

DOCS = Path(__file__).parents[3] / "docs" / "jobs.md"
PLATFORMS = [LOCAL, SAGEMAKER, cluster_platform("slurm"), cluster_platform("kubernetes")]


def test_every_status_of_the_service_model_that_can_last_is_in_the_table() -> None:
    """AWS may add some; then this test names them."""
    model = botocore.session.get_session().get_service_model("sagemaker")
    statuses = model.shape_for("SecondaryStatus").enum
    ends = {name for name in statuses if name.startswith("Max")}
    # Updating is listed and not described.
    assert set(statuses) - ends - SAGEMAKER.phases.keys() == {"Updating"}
    assert SAGEMAKER.phases.keys() - set(statuses) == set()


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
def test_each_row_has_a_source_and_a_limit_that_follows_its_warning(platform: Platform) -> None:
    for phase in platform.phases.values():
        assert phase.source
        assert phase.silence in ("waits", "prepares", "trains", "stores", "ended")
        if phase.limit is not None:
            assert phase.usual is not None
            assert phase.usual < phase.limit
        if phase.silence in ("waits", "ended"):
            assert (phase.is_billed, phase.usual) == (False, None)


def test_the_documentation_has_the_table() -> None:
    table = DOCS.read_text().partition("| phase of the job |")[2].partition("\n\n")[0]
    seen = set()
    for row in table.splitlines()[2:]:
        names, billed, usual, silence = (cell.strip() for cell in row.strip("| ").split(" | "))
        for name in re.findall(r"`(\w+)`", names):
            phase = SAGEMAKER.phases[name]
            seen.add(name)
            assert billed == ("yes" if phase.is_billed else "no")
            assert usual.startswith("–" if phase.usual is None else _words(phase.usual))
            if phase.limit is not None:
                assert f"after {_words(phase.limit)}" in silence.lower()
    lasting = {name for name, phase in SAGEMAKER.phases.items() if phase.silence != "ended"}
    assert seen == lasting


def _words(duration: timedelta) -> str:
    minutes = int(duration.total_seconds() / 60)
    return f"{minutes // 60} h" if minutes % 60 == 0 else f"{minutes} min"
