"""A streaming pack whose functions are killed at any of their requests to S3."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from sm_train.entrypoints.data_prep.streaming import lambda_handler
from sm_train.entrypoints.data_prep.streaming.stream_state import DONE, RECORDS, SEEN, STAGED

from tests.conftest import Aws
from tests.support.image_files import image_bytes
from tests.support.order.traced import Call, Program, read_trace
from tests.support.streaming.deployment import Deployment, FakeContext, deploy

NAMES = [f"{number}.jpg" for number in range(4)]
FLUSH = """
from sm_train.entrypoints.data_prep.streaming import lambda_handler
from tests.support.streaming.deployment import FakeContext
lambda_handler.seal({"flush": True}, FakeContext())
"""
ROOT = Path(__file__).parents[2]


class Stream:
    """Images that have been staged, and a function that seals them in a process of its own."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self._deployment, self._folder = deployment, folder
        for number, name in enumerate(NAMES):
            deployment.arrive(name, image_bytes(number))
        assert lambda_handler.stage({"Records": deployment.receive()}, FakeContext()) == {
            "batchItemFailures": []
        }

    def seal(self, kill_at: int = 0) -> tuple[int, list[Call]]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # that of the deployment
        program = Program(self._folder, environment, (), FLUSH)
        done = program.run(self._folder / "trace", kill_at)
        return done.returncode, read_trace(self._folder / "trace")

    def require_complete(self, at: object) -> None:
        """Repeat the function: each image is packed once, and nothing else is left."""
        self._deployment.flush()
        index, seen = self._deployment.packed(self._folder / "packed")
        assert seen == Counter(NAMES), at
        assert len(index) == 1, at
        assert self._deployment.keys(f"{STAGED}/") == [], at


@pytest.fixture
def stream(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    return Stream(deploy(aws, monkeypatch), tmp_path)


def position(calls: list[Call], kind: str, part: str) -> list[int]:
    return [number for number, call in enumerate(calls) if call.kind == kind and part in call.path]


@pytest.mark.integration
def test_a_shard_is_stored_before_what_says_so(stream: Stream) -> None:
    code, calls = stream.seal()
    assert code == 0
    shard = max(position(calls, "PUT", "/shards/"))
    [record] = position(calls, "PUT", f"/{RECORDS}/")
    seen, removed = position(calls, "PUT", f"/{SEEN}/"), position(calls, "DELETE", f"/{STAGED}/")
    [done] = position(calls, "PUT", f"/{DONE}/")
    index = position(calls, "PUT", "index.parquet")
    assert len(seen) == len(removed) == len(NAMES)
    assert shard < record < min(seen)
    for marked in seen:  # a sample is removed after it is marked
        name = calls[marked].name
        [left] = [number for number in removed if calls[number].name == name]
        assert marked < left
    assert max(*seen, *removed) < done < min(index)
    forgotten = position(calls, "DELETE", f"/{RECORDS}/") + position(calls, "DELETE", f"/{DONE}/")
    assert all(number > max(index) for number in forgotten)


@pytest.mark.integration
def test_a_kill_at_some_request_of_sealing_loses_and_repeats_nothing(stream: Stream) -> None:
    code, calls = stream.seal(kill_at=12)
    assert code != 0
    stream.require_complete(calls[-1])


@pytest.mark.integration
def test_a_kill_after_the_index_is_stored_loses_no_record(stream: Stream) -> None:
    """Records are forgotten once the index has them: before that, it could not be written again."""
    code, calls = stream.seal(kill_at=55)
    assert code != 0
    stream.require_complete(calls[-1])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 75))
def test_a_kill_at_any_request_of_sealing_loses_and_repeats_nothing(
    stream: Stream, number: int
) -> None:
    code, calls = stream.seal(kill_at=number)
    # The last numbers are those of later requests than a run makes.
    assert (code == 0) == (len(calls) < number), (number, len(calls))
    stream.require_complete(calls[-1])
