"""Random lives of runs: at most one live job, a budget that holds, and no work that is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lives import clusters, local, sagemaker

SOME, ALL = range(300), range(300, 10_300)


def test_some_lives_on_sagemaker_break_no_rule() -> None:
    ends = sagemaker.play(SOME)
    # Every way to end is reached; none hangs.
    assert {"OK", "OVER_BUDGET", "JOB_FAILED", "CAPACITY", "STALLED"} >= ends.keys()
    assert ends["OK"] > 50
    assert ends["STALLED"] > 0
    assert len(ends) >= 3


@pytest.mark.parametrize("platform", ["kubernetes", "slurm"])
def test_some_lives_on_clusters_break_no_rule(platform: str) -> None:
    ends = clusters.play(platform, SOME)
    assert ends["OK"] > 50
    assert ends["OVER_BUDGET"] > 20
    # A failure without progress is restarted on Kubernetes, and ends the job on Slurm.
    assert ends["STALLED" if platform == "kubernetes" else "JOB_FAILED"] > 5


def test_some_lives_on_this_machine_break_no_rule(tmp_path: Path) -> None:
    ends = local.play(tmp_path, SOME)
    assert ends.keys() >= {"done", "training", "stalled", "stopped", "failed"}


@pytest.mark.slow
def test_ten_thousand_lives_on_sagemaker_break_no_rule() -> None:
    sagemaker.play(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["kubernetes", "slurm"])
def test_ten_thousand_lives_on_clusters_break_no_rule(platform: str) -> None:
    clusters.play(platform, ALL)


@pytest.mark.slow
def test_ten_thousand_lives_on_this_machine_break_no_rule(tmp_path: Path) -> None:
    local.play(tmp_path, ALL)


def test_a_second_job_of_a_run_does_not_train_beside_the_first() -> None:
    life = clusters.Life(clusters.platform("slurm"), clusters.Draw.of(0))
    life.advance(clusters.BEGIN + 1800)
    life.submit()
    life.advance(clusters.BEGIN + 3600)


@pytest.mark.parametrize("platform", ["kubernetes", "slurm"])
def test_a_job_that_was_stopped_in_the_queue_does_not_train(platform: str) -> None:
    life = clusters.Life(clusters.platform(platform), clusters.Draw.of(0))
    life.advance(clusters.BEGIN + 1800)
    life.preempt()
    life.run_in_memory().store_stop(clusters.STAGE, "sm-train stop")
    assert life.due is not None
    life.advance(life.due + 900)
    assert not life.attempts[-1].live


def test_a_budget_holds_although_a_job_waits_in_the_queue() -> None:
    """Three minutes after its nodes have ended `watch` leaves a job that comes back."""
    clusters.play("kubernetes", SOME, leaves=True)


def test_a_job_that_hangs_before_its_first_event_is_stopped() -> None:
    sagemaker.Life(_calm_on("on-demand"), hangs_at_start=True).play()


def test_a_run_whose_training_plan_has_ended_moves_to_its_fallback() -> None:
    life = sagemaker.Life(_calm_on("training-plan"))
    life.policy = replace(life.policy, placements=2)
    assert life.action_after("MaxRuntimeExceeded").placement == 1


def _calm_on(capacity: str) -> int:
    """Return the seed of a life that nothing disturbs."""
    draws = map(sagemaker.Draw.of, range(1000))
    return next(each.seed for each in draws if each.is_calm and each.capacity == capacity)
