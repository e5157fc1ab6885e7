"""Tests of answers that rest on the end of a log: no traceback or known message ended the job."""

from __future__ import annotations

import pytest
from sm_train.toolkit.analysis.diagnose.diagnosis import UNKNOWN
from sm_train.toolkit.analysis.diagnose.line_patterns import step_pattern
from sm_train.toolkit.analysis.diagnose.step_counter import StepCounter

from tests.support.log_lines import HEALTHY, diagnosed, is_left_alone


@pytest.mark.parametrize(
    "line",
    ["ERROR the weather is grey", "connection closed", "WARNING GPU out of memory? retrying"],
)
def test_message_without_an_error_or_without_its_subject_names_no_cause(line: str) -> None:
    assert is_left_alone(diagnosed([*HEALTHY, line]))


def test_tasks_that_slurm_kills_after_one_exited_are_no_cause() -> None:
    exited = "srun: error: node-3: task 5: Exited with exit code 1"
    killed = "srun: error: node-4: tasks 0-3: Killed"
    assert diagnosed([exited, killed]).cause == UNKNOWN
    assert diagnosed([killed, exited]).cause == "process-killed"


def test_message_of_an_exception_counts_without_its_type() -> None:
    found = diagnosed([*HEALTHY, "Error running job: cannot pickle 'weakref.ReferenceType' object"])
    assert (found.cause, found.confidence) == ("process-start", "low")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError:Network outputs is NAN! Stop Training", "diverged"),
        ('"GatedRepoError: 401 Client Error. (Request ID: Root=1-65fd9fbe)', "hub-denied"),
        ("  assertionerror: loss log variables are different across gpus!", "program-error"),
    ],
)
def test_exception_counts_however_it_is_spelled(line: str, cause: str) -> None:
    assert diagnosed([*HEALTHY, line]).cause == cause


@pytest.mark.parametrize(
    "lines",
    [
        ["AssertionError: ", "Found no NVIDIA driver on your system. Please check that you"],
        ["Exception has occurred: RuntimeError", "No CUDA GPUs are available"],
        ["RuntimeError: the worker could not start:", "no CUDA-capable device is detected"],
    ],
)
def test_message_may_start_on_the_line_after_the_type(lines: list[str]) -> None:
    frame = ["Traceback (most recent call last):", '  File "train.py", line 88, in main']
    assert diagnosed([*HEALTHY, *lines]).cause == "cuda-no-driver"
    assert diagnosed([*HEALTHY, *frame, *lines]).cause == "cuda-no-driver"


def test_line_in_a_box_of_a_terminal_program_is_a_message() -> None:
    line = "│ RuntimeError: CUDA error: misaligned address                      │"
    assert diagnosed([*HEALTHY, line]).cause != UNKNOWN
    source = "│ ❱ 88 │   raise RuntimeError('CUDA error: misaligned address')       │"
    assert diagnosed([*HEALTHY, source.replace("raise", "print")]).cause == UNKNOWN


def test_exit_code_alone_names_no_cause() -> None:
    assert diagnosed([*HEALTHY, "the program failed with exit code 3"]).cause == UNKNOWN


def test_task_that_slurm_kills_after_the_job_was_canceled_is_no_cause() -> None:
    canceled = (
        "slurmstepd: error: *** STEP 22051979.1 ON gpu-3 CANCELLED AT 2025-10-23T14:31:08 ***"
    )
    killed = "srun: error: gpu-3: task 0: Killed"
    assert diagnosed([canceled, killed]).cause == "terminated"


def test_error_before_two_further_steps_names_no_cause() -> None:
    failed = "download failed: s3://bucket/shard-000221.tar to - [Errno 32] Broken pipe"
    steps = ["step 30 loss 0.7", "step 40 loss 0.7"]
    assert is_left_alone(diagnosed([failed, *steps, "weights are in /out"]))
    assert diagnosed([steps[0], failed, steps[1]]).cause == "connection-failed"


def test_text_that_nccl_repeats_is_not_compared_with_messages_of_programs() -> None:
    found = diagnosed(
        [
            "Traceback (most recent call last):",
            '  File "/opt/ml/code/train.py", line 88, in main',
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, internal error",
            "ncclInternalError: Internal check failed.",
            "Last error:",
            "Could not find real path of /sys/class/pci_bus/0000:10",
        ]
    )
    assert found.cause == UNKNOWN


def test_lines_are_not_counted_for_a_step_that_other_ranks_repeat() -> None:
    """Counting them takes time in proportion to the block, and each rank logs each step."""
    step_match = step_pattern().search(b"step 30 loss 0.7")
    assert step_match is not None
    steps = StepCounter()
    assert steps.is_new(step_match, lambda: 100)
    assert not steps.is_new(step_match, lambda: pytest.fail("counts lines"))
    assert steps.count == 1
