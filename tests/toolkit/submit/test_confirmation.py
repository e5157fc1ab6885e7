"""``submit`` asks on a terminal, and waits for as long as the user takes to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Aws
from tests.support.run_documents import stage
from tests.support.run_files import write_run
from tests.toolkit.commands.terminal_process import terminal_process

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}
QUESTION = "Start a, $"
ERASE = "\x7f"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("keys", "code", "outcome"),
    [
        (["q", "\n", "n", ERASE, "Y", "\n"], 0, "watch demo"),
        (["y", ERASE, "\n"], 130, "sm-train: nothing was started"),  # the default is no
        pytest.param(["y", "\x03"], 130, "sm-train: interrupted", marks=pytest.mark.slow),
    ],
)
def test_answer_is_typed_key_by_key(
    aws: Aws, tmp_path: Path, keys: list[str], code: int, outcome: str
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    run = write_run(tmp_path, stages=[stage("a"), stage("b")])
    with terminal_process(["submit", run], cwd=tmp_path, env=aws.environment) as process:
        process.expect(QUESTION)
        process.expect("[y/N]:")
        assert " of $" in process.output[process.output.index(QUESTION) :]
        *typed, last = keys
        for key in typed:
            process.send(key)
        # It reads whole lines: so far there is no answer, however long the user takes.
        assert process.process.poll() is None
        assert aws.bodies("CreateTrainingJob") == []
        process.send(last)
        assert process.finish() == code, process.output
        assert outcome in process.output
    assert len(aws.bodies("CreateTrainingJob")) == (code == 0)
