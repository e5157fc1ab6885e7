"""What the ranks of an observed script agree on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from sm_train.entrypoints.distributed.messages import Messages
from sm_train.entrypoints.script import ranks
from sm_train.entrypoints.script.ranks import ScriptRank, ScriptRanks

from tests.support.deadline import DEADLINE


def create_ranks(folder: Path, count: int, steps: list[int]) -> list[ScriptRanks]:
    messages = Messages(dist.HashStore(), b"the job's key")
    return [
        ScriptRanks(
            folder,
            ScriptRank(rank, count, 0, rank, count),
            messages,
            step=lambda rank=rank: steps[rank],  # type: ignore[misc]
            steps_per_second=lambda: 1.0,
            on_complete=lambda save, marker: None,
        )
        for rank in range(count)
    ]


def test_no_rank_waits_for_a_checkpoint_that_another_one_cannot_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 hangs before the step of the last save: rank 0 gives up, and rank 1 ends with it."""
    monkeypatch.setattr(ranks, "END_TIMEOUT", 0.5)
    first, second, hanging = create_ranks(tmp_path, 3, [5, 5, 4])
    first.begin_save("checkpoint-5", 5)
    first.end_save(seconds=0.1)
    hanging.tick()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(ranks.finish, lambda: None) for ranks in (first, second)]
        assert [end.result(DEADLINE) for end in ends] == [False, True]
