"""The checks of a run with its own training script."""

from __future__ import annotations

from typing import Any

import pytest
from sm_train.toolkit.checks.entry import entry_findings

from tests.support.run_documents import config, stage

RESUMES = ["--data", "{channel.train}", "--resume", "{resume}"]
OWN = {"code": ".", "entry": "own.py", "entry_args": RESUMES}
DATA = {"uri": "s3://ai-bucket/shards/"}
MASKS = {"masks": {"uri": "s3://own/masks/"}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        (OWN, []),
        (OWN | {"data": DATA | {"sharded": True}}, [("warning", "entry-sharded", "data.sharded")]),
        (OWN | {"data": DATA | {"sharded": True}, "stages": [stage(instances=1)]}, []),
        (
            OWN | {"channels": {"masks": MASKS["masks"] | {"sharded": True}}},
            [("warning", "entry-sharded", "channels.masks.sharded")],
        ),
        (
            OWN | {"entry_args": [*RESUMES, "{channel.masks}"]},
            [("error", "entry-channel", "entry_args")],
        ),
        (OWN | {"entry_args": [*RESUMES, "{channel.masks}"], "channels": MASKS}, []),
        (
            OWN | {"entry_args": ["{channel.index}", "latest"]},
            [("error", "entry-channel", "entry_args")],
        ),
        (OWN | {"entry_args": []}, [("info", "entry-resume", "entry_args")]),
        (OWN | {"entry_args": ["--resume_from_checkpoint", "latest"]}, []),
    ],
)
def test_findings_of_an_own_script(
    changes: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    found = entry_findings(config(**changes))
    assert [(finding.level, finding.code, finding.where) for finding in found] == expected
