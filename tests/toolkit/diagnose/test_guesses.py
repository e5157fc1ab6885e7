"""Tests of answers of low confidence about logs in which nothing known was found."""

from __future__ import annotations

import pytest
from sm_train.toolkit.diagnose.diagnosis import UNKNOWN
from sm_train.toolkit.diagnose.guesses import cause_by_words, guessed_cause, words_by_cause
from sm_train.toolkit.diagnose.signatures import matching, signatures
from sm_train.toolkit.diagnose.similar import MIN_SIMILARITY, messages_by_code, most_similar

from tests.support.log_lines import HEALTHY, WRITTEN, diagnosed, is_left_alone, step
from tests.toolkit.diagnose.log_corpus import KnownLog, corpus, parts


def text_of(log: KnownLog) -> str:
    files = log.path.iterdir() if log.path.is_dir() else [log.path]
    return "\n".join(file.read_text() for file in files)


def test_every_cause_of_the_table_is_one_of_a_signature() -> None:
    assert {words.code for words in words_by_cause()} <= set(signatures())


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ERROR the volume of the shared storage has no bytes left", "disk-full"),
        ("FATAL vram oom in block 7", "gpu-out-of-memory"),
        ("ERROR 3 of 8 workers disappeared", "process-killed"),
        ("[Error] resuming failed: no checkpoint available in /fsx/out", "checkpoint-missing"),
        ("ERROR the handshake with the feature server was aborted", "connection-failed"),
    ],
)
def test_words_of_an_error_message_name_a_cause_with_low_confidence(line: str, cause: str) -> None:
    found = diagnosed([*HEALTHY, line])
    assert (found.cause, found.confidence) == (cause, "low")
    assert found.details[-1].startswith("a guess from the end of the log")
    assert found.evidence[0].text.endswith(line.removeprefix("ERROR ").removeprefix("FATAL "))
    later = [step(number, WRITTEN + number) for number in range(9, 15)]
    assert is_left_alone(diagnosed([*HEALTHY, line, *later]))


@pytest.mark.parametrize(
    "line",
    ["ERROR the weather is grey", "connection closed", "WARNING GPU out of memory? retrying"],
)
def test_message_without_an_error_or_without_its_subject_is_no_guess(line: str) -> None:
    assert is_left_alone(diagnosed([*HEALTHY, line]))


def test_exception_in_the_middle_of_a_line_counts() -> None:
    found = diagnosed([*HEALTHY, "*** KeyError: 'text_embeds'"])
    assert (found.cause, found.confidence) == ("program-error", "low")


def test_known_message_at_a_lower_level_counts_before_an_error() -> None:
    warning = (
        "2026-11-21 10:00:00,100 WARNING worker.py:1829 -- A worker died or was killed while "
        "executing a task by an unexpected system error. Worker exit type: SYSTEM_ERROR"
    )
    error = "2026-11-21 10:00:01,100 ERROR trial_runner.py:980 -- Error processing event."
    found = diagnosed([*HEALTHY, warning, error])
    assert (found.cause, found.confidence) == ("ray-worker-died", "low")
    assert is_left_alone(diagnosed([*HEALTHY, warning]))


def test_unknown_message_gets_the_cause_of_the_known_ones_that_it_resembles() -> None:
    message = "ERROR failed to allocate memory on the GPU: CUDA ran out of memory in block 7"
    assert not matching(message)
    code, similarity = most_similar(message)
    assert code == guessed_cause(message) == "gpu-out-of-memory"
    assert similarity >= MIN_SIMILARITY
    found = diagnosed([*HEALTHY, message])
    assert (found.cause, found.confidence) == ("gpu-out-of-memory", "low")
    assert most_similar("12345 %$") == (None, 0.0)


def test_message_that_resembles_those_of_launchers_is_no_cause() -> None:
    """They only show that another process failed."""
    message = "Rank 7 crashed with exit code 4, terminating the others"
    assert guessed_cause(message) is None


def test_cause_with_the_most_words_counts() -> None:
    assert cause_by_words("checkpoint shard 3 is corrupt: checksum of the tar differs") == (
        "shard-truncated"
    )
    assert cause_by_words("the weather is grey") is None


def test_tasks_that_slurm_kills_after_one_exited_are_no_cause() -> None:
    exited = "srun: error: node-3: task 5: Exited with exit code 1"
    killed = "srun: error: node-4: tasks 0-3: Killed"
    assert diagnosed([exited, killed]).cause == UNKNOWN
    assert diagnosed([killed, exited]).cause == "process-killed"


def test_message_of_an_exception_counts_without_its_type() -> None:
    found = diagnosed([*HEALTHY, "Error running job: cannot pickle 'weakref.ReferenceType' object"])
    assert (found.cause, found.confidence) == ("process-start", "low")


def test_failed_call_that_rarely_ends_a_job_is_a_guess_as_the_last_line_only() -> None:
    line = "algo-1:19:37 [0] rdma_init:78 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data"
    assert diagnosed([*HEALTHY, line]).cause == "efa-missing"
    assert is_left_alone(diagnosed([*HEALTHY, line, "loading the model"]))


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError:Network outputs is NAN! Stop Training", "diverged"),
        ('"GatedRepoError: 401 Client Error. (Request ID: Root=1-65fd9fbe)', "hub-denied"),
        ("  assertionerror: loss log variables are different across gpus!", "program-error"),
        ("    raise GatedRepoError(message, response) from e", "hub-denied"),
        ("│ ❱ 88 │   raise UnidentifiedImageError('cannot identify image file')", "image-corrupt"),
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


def test_less_usual_words_report_a_failure_at_the_end_of_a_log_only() -> None:
    line = "no checkpoint at /fsx/out: it does not exist"
    assert diagnosed([*HEALTHY, line]).cause == "checkpoint-missing"
    assert is_left_alone(diagnosed([*HEALTHY, line, "loading", "building", "starting"]))


def test_exit_code_alone_names_no_cause() -> None:
    assert diagnosed([*HEALTHY, "the program failed with exit code 3"]).cause == UNKNOWN


def test_task_that_slurm_kills_after_the_job_was_canceled_is_no_cause() -> None:
    canceled = (
        "slurmstepd: error: *** STEP 22051979.1 ON gpu-3 CANCELLED AT 2025-10-23T14:31:08 ***"
    )
    killed = "srun: error: gpu-3: task 0: Killed"
    assert diagnosed([canceled, killed]).cause == "terminated"


def test_known_messages_come_from_tuned_logs() -> None:
    messages = messages_by_code()
    assert messages.keys() <= signatures().keys()
    tuned = "\n".join(text_of(log) for log in parts(corpus())["tuned"])
    own = [text for texts in messages.values() for text in texts]
    # The start of a message: its end may be joined from two lines.
    missing = [text for text in own if text[:30] not in tuned]
    assert len(missing) <= 0.02 * len(own), missing


def test_error_before_two_further_steps_is_no_guess() -> None:
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
