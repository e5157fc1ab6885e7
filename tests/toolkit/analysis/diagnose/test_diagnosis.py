"""Tests of the diagnosis of several nodes' logs: the cause, and the rank that failed first."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sm_train.entrypoints.base.sagemaker_paths import host_names
from sm_train.entrypoints.job_interface.events import format_event
from sm_train.toolkit.analysis.diagnose.diagnosis import UNKNOWN, diagnose
from sm_train.toolkit.analysis.diagnose.log_scanner import scan

from tests.support.job_log_lines import event_values
from tests.support.log_lines import DONE, HEALTHY, WRITTEN, diagnosed, is_left_alone, step, stream

BEGIN = WRITTEN - 3600


def clock(second: float, month_day: str = "1122") -> str:
    """Format a time as in PyTorch's C++ and Python logs."""
    minutes, seconds = divmod(second, 60)
    return f"{month_day} {8 + int(minutes) // 60:02}:{int(minutes) % 60:02}:{seconds:09.6f}"


def traceback(error: str, rank: int | None = None) -> list[str]:
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/ml/code/train.py", line 212, in <module>',
        "    main()",
        '  File "/opt/ml/code/train.py", line 88, in main',
        "    loss = step(batch)",
        error,
    ]
    return lines if rank is None else [f"[rank{rank}]: {line}" for line in lines]


def echoes(ranks: range, second: float = 100) -> list[str]:
    """Return the messages of NCCL on ``ranks`` after a peer has died."""
    lines = []
    for rank in ranks:
        lines += [
            f"[rank{rank}]:[E{clock(second)} ProcessGroupNCCL.cpp:2068] [PG ID 0 Rank {rank}] "
            "Process group watchdog thread terminated with exception: NCCL error: remote process "
            "exited or there was a network error, NCCL version 2.21.5",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely.",
            "Last error:",
            f"NET/OFI Request 0x7f14cc5b60c0 completed with error. RC: 107. Error: {rank}",
        ]
    return lines


def timeout(
    rank: int,
    number: int = 1580,
    kind: str = "ALLREDUCE",
    second: float = 1900,
    *,
    group: str | None = "0 PG GUID 0(default_pg)",
    group_rank: int | None = None,
) -> str:
    """Return the lines of a collective that timed out; without a ``group``, the first alone.

    As PyTorch 2.7 and later print them, in https://github.com/ecmwf/WeatherGenerator/pull/1533.
    """
    in_group = rank if group_rank is None else group_rank
    first = (
        f"[rank{rank}]:[E{clock(second)} ProcessGroupNCCL.cpp:629] [Rank {in_group}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, "
        "NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600045 milliseconds before "
        "timing out."
    )
    if group is None:
        return first
    return (
        f"{first}\n[rank{rank}]:[E{clock(second)} ProcessGroupNCCL.cpp:2168] [PG ID {group} Rank "
        f"{in_group}]  failure detected by watchdog at work sequence id: {number} PG status: last "
        f"enqueued work: {number + 34}, last completed work: {number - 1}"
    )


def torchrun_report(rank: int, exit_code: int, second: float = 101) -> list[str]:
    """Return torchrun's error report on the node of ``rank``."""
    minutes, seconds = divmod(int(second), 60)
    return [
        f"W{clock(second)} 88 torch/distributed/elastic/multiprocessing/api.py:900] Sending "
        "process 1200 closing signal SIGTERM",
        f"E{clock(second)} 88 torch/distributed/elastic/multiprocessing/api.py:874] failed "
        f"(exitcode: {exit_code}) local_rank: {rank % 8} (pid: 1203) of binary: /opt/bin/python",
        *traceback("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "),
        "============================================================",
        "train.py FAILED",
        "------------------------------------------------------------",
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "------------------------------------------------------------",
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : 2026-11-22_08:{minutes:02}:{seconds:02}",
        "  host      : algo-2",
        f"  rank      : {rank} (local_rank: {rank % 8})",
        f"  exitcode  : {exit_code} (pid: 1203)",
        "  error_file: <N/A>",
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        "============================================================",
    ]


def training(node: int = 0, until: int = 100) -> list[str]:
    return [*HEALTHY, *(step(number, BEGIN + number, node=node) for number in range(until))]


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has 39.39 GiB"


def test_out_of_memory_rank_is_found_despite_echoes_of_its_peers() -> None:
    found = diagnosed(
        [*training(), *echoes(range(8), second=90)],
        [*training(1), *traceback(OOM, rank=11), *echoes(range(8, 16)), *torchrun_report(11, 1)],
        [*training(2), *echoes(range(16, 24), second=95)],
    )
    assert (found.cause, found.confidence, found.retryable) == ("gpu-out-of-memory", "high", False)
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 11)
    assert found.first.line == OOM


def test_xid_explains_the_cuda_error() -> None:
    xid = "NVRM: Xid (PCI:0000:06:00): 79, pid=1203, GPU has fallen off the bus."
    found = diagnosed(
        [*training(), *echoes(range(8))],
        [
            *training(1),
            *traceback("RuntimeError: CUDA error: unspecified launch failure", rank=9),
            xid,
            *torchrun_report(9, 1),
        ],
    )
    assert found.cause == "xid-79"
    assert found.retryable is True
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 9)


def test_unexplained_kill_is_worth_a_retry_but_not_one_for_lack_of_memory() -> None:
    killed = [*training(1), *torchrun_report(13, -9)]
    found = diagnosed([*training(), *echoes(range(8))], killed)
    assert (found.cause, found.confidence, found.retryable) == ("process-killed", "medium", True)
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 13)
    kernel = (
        "[18026.221140] Memory cgroup out of memory: Killed process 1203 (python3) "
        "total-vm:120832kB, anon-rss:15596kB"
    )
    found = diagnosed([*training(), *echoes(range(8))], [*killed, kernel])
    assert (found.cause, found.confidence) == ("host-out-of-memory", "high")
    assert not found.retryable


def test_exception_without_signature_outranks_echoes() -> None:
    error = (
        "RuntimeError: The encoder is not ready at step 120 of rank 12 of this node, start it again"
    )
    found = diagnosed(
        [*training(), *echoes(range(8))],
        [*training(1), *traceback(error, rank=12), *torchrun_report(12, 1)],
    )
    assert (found.cause, found.retryable) == ("program-error", False)
    assert error in found.title
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 12)


def test_torchrun_summary_provides_a_missing_rank() -> None:
    found = diagnosed([*training(), *traceback("KeyError: 'caption'"), *torchrun_report(5, 1)])
    assert found.cause == "program-error"
    assert found.first is not None
    assert found.first.rank == 5


def test_chained_exception_is_skipped() -> None:
    chain = [
        *traceback("_queue.Empty"),
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        *traceback("RuntimeError: DataLoader worker (pid(s) 3216) exited unexpectedly"),
    ]
    assert diagnosed([*training(), *chain]).cause == "dataloader-killed"
    inner = [
        *traceback("KeyError: Caught KeyError in DataLoader worker process 0."),
        *["Original Traceback (most recent call last):", *traceback("KeyError: 'txt'")[1:]],
    ]
    assert diagnosed([*training(), *inner]).title == "The program raised KeyError: 'txt'"


@pytest.mark.parametrize(
    "error", ["ValueError: bad caption", "socket.error: odd", "_queue.Empty2", "KeyError: 'x'"]
)
def test_traceback_without_indentation_is_recognized(error: str) -> None:
    lines = [
        "Traceback (most recent call last):",
        'File "/opt/ml/input/data/code/train.py", line 212, in <module>',
        "main()",
        'File "/opt/ml/input/data/code/train.py", line 88, in main',
        "loss = step(",
        "batch,",
        ")",
        "^^^^^^",
        'raise RuntimeError("CUDA error: out of memory")',
        error,
    ]
    found = diagnosed([*training(), *lines, *(line.strip() for line in torchrun_report(4, 1))])
    assert (found.cause, found.first and found.first.line) == ("program-error", error)
    assert found.first is not None
    assert found.first.rank == 4


def test_harmless_tracebacks_are_ignored() -> None:
    ignored = [
        "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f3e5c0a2d60>",
        *traceback("AssertionError: can only test a child process"),
    ]
    assert is_left_alone(diagnosed([*training(), *ignored]))
    logged = [*traceback("OSError: [Errno 28] No space left on device"), *training(until=10)]
    # The same holds for a traceback that was truncated.
    assert is_left_alone(diagnosed([*HEALTHY, OOM, *traceback("")[:-1], *training(until=10)]))
    found = diagnosed([*HEALTHY, *logged])
    assert is_left_alone(found)
    assert found.details[0] == "seen 1 ×, but training continued: The disk is full"


def test_exception_in_a_trackers_thread_does_not_end_the_training() -> None:
    def in_thread(file: str) -> list[str]:
        frame = f'  File "/opt/conda/lib/python3.11/site-packages/{file}", line 136, in run'
        error = "OSError: [Errno 28] No space left on device"
        return ["Exception in thread Thread-5 (check_stop_status):", OPENED, frame, error]

    tracker, loader = in_thread("wandb/sdk/lib/sock_client.py"), in_thread("webdataset/writer.py")
    assert diagnosed([*training(), *tracker]).cause == UNKNOWN
    assert diagnosed([*training(), *tracker, OOM]).cause == "gpu-out-of-memory"
    assert diagnosed([*training(), *loader]).cause == "disk-full"


def test_failure_followed_by_many_lines_was_handled() -> None:
    handled = traceback("ImportError: cannot import name 'fused' from 'apex'")
    found = diagnosed([*handled, *HEALTHY * 4, *traceback(OOM, rank=2)])
    assert found.cause == "gpu-out-of-memory"


def test_logged_exception_does_not_outrank_an_uncaught_one() -> None:
    logged = "OSError: [Errno 28] No space left on device: '/root/.cache/tracker'"
    found = diagnosed([*training(), logged, *traceback("KeyError: 'x'")])
    assert found.title == "The program raised KeyError: 'x'"
    assert diagnosed([*training(), logged]).cause == "disk-full"
    kernel = "[18026.221140] Out of memory: Killed process 1203 (python3) total-vm:120832kB"
    found = diagnosed([*training(), kernel, *traceback("KeyError: 'x'")])
    assert found.cause == "host-out-of-memory"


def test_match_is_superseded_by_later_steps_on_another_node() -> None:
    early = datetime.fromtimestamp(BEGIN + 100, UTC).isoformat()
    xid = f"{early} NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked"
    assert is_left_alone(diagnosed(training(until=500), [*HEALTHY, xid]))
    assert diagnosed([*HEALTHY], [*HEALTHY, xid]).cause == "xid-row-remap"


def test_earliest_cause_counts_and_simultaneous_causes_are_unknown() -> None:
    def at(second: int, text: str) -> str:
        return f"2026-11-22T08:00:{second:02}.000Z {text}"

    denied = "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject operation: Access Denied"  # noqa: E501
    full = "OSError: [Errno 28] No space left on device: '/tmp/x'"
    found = diagnosed([at(40, full)], [at(10, denied)])
    assert found.cause == "s3-denied"
    assert found.first is not None
    assert found.first.node == "algo-2"
    for earlier, other in ((at(12, full), at(10, denied)), (full, denied)):
        found = diagnosed([earlier], [other])
        assert found.cause == "unknown"
        assert {match.text for match in found.evidence} == {full, denied}
        assert "conflicting causes" in found.details[-1]


def test_rank_in_an_earlier_collective_is_the_lagging_one() -> None:
    found = diagnosed(
        [*training(), *(timeout(rank) for rank in range(8))],
        [*training(1), *(timeout(rank, 1579 if rank == 12 else 1580) for rank in range(8, 16))],
    )
    assert (found.cause, found.confidence) == ("nccl-timeout", "medium")
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 12)
    assert "rank 12 in ALLREDUCE 1579" in found.details[-1]


def start_of(world_size: int) -> str:
    """Return the start event of a job on two nodes."""
    values = event_values("start") | {"world_size": world_size, "nodes": 2}
    return format_event("start", values, time=BEGIN, node=0, rank=0)


def test_rank_without_a_timeout_is_the_first_failure() -> None:
    """The earliest timeout is that of a rank which only waits."""
    found = diagnosed(
        [start_of(8), *(timeout(rank, second=1900 + rank) for rank in range(4))],
        [timeout(rank, second=1890) for rank in range(4, 8) if rank != 5],
    )
    assert found.cause == "nccl-timeout"
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 5)
    assert found.first.line == (
        "rank 5 reported no timeout, and the other 7 ranks wait in ALLREDUCE 1580"
    )
    assert found.details == ("no timeout from rank 5: check there first",)


@pytest.mark.parametrize(
    ("reporting", "world_size", "note"),
    [
        # Two ranks are silent, or a node's log is missing.
        ({0, 1, 2, 4, 5, 6}, 8, "no timeout from ranks 3, 7: check there first"),
        ({0, 1, 2, 3}, 8, "no timeout from ranks 4, 5, 6, 7: check there first"),
        # The number of ranks is unknown: others than rank 1 may be silent, too.
        ({0, 2, 3}, None, "no timeout from rank 1: check there first"),
        ({0, 1, 2, 3}, 4, None),
    ],
)
def test_rank_is_unknown_unless_all_others_reported(
    reporting: set[int], world_size: int | None, note: str | None
) -> None:
    start = [start_of(world_size)] if world_size else []
    found = diagnosed([*start, *(timeout(rank, second=1900 - rank) for rank in reporting)])
    assert found.cause == "nccl-timeout"
    assert found.first is not None
    assert (found.first.node, found.first.rank) == (None, None)
    assert found.details == (() if note is None else (note,))


def test_process_groups_are_not_compared_with_each_other() -> None:
    """HSDP: shards of four ranks in each node, and replicas of two ranks across the nodes."""

    def shards(silent: set[int]) -> list[str]:
        groups = (f"1 PG GUID {5 + node}(mesh_shard)" for node in range(2))
        return [
            timeout(4 * node + rank, 900, "_ALLGATHER_BASE", group=group, group_rank=rank)
            for node, group in enumerate(groups)
            for rank in range(4)
            if 4 * node + rank not in silent
        ]

    replicas = [
        timeout(4 * node, 12, group="2 PG GUID 7(mesh_replicate)", group_rank=node)
        for node in range(2)
    ]
    found = diagnosed([start_of(8), *shards({5, 6}), *replicas])
    assert found.first is not None
    assert found.first.rank is None
    assert found.details == ("no timeout from ranks 5, 6: check there first",)
    # All ranks wait, and the numbers of their groups differ.
    found = diagnosed([start_of(8), *shards(set()), *replicas])
    assert found.first is not None
    assert found.first.rank is None
    assert found.details == ()
    # In whatever group a rank waits: one alone does not.
    default = [timeout(rank, 31) for rank in range(3)]
    found = diagnosed([start_of(8), *default, *shards({0, 1, 2, 6}), *replicas[1:]])
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 6)
    assert (
        found.first.line == "rank 6 reported no timeout, and the other 7 ranks wait in collectives"
    )
    assert found.details == ("no timeout from rank 6: check there first",)


def test_waiting_ranks_are_not_blamed_for_the_numbers_of_other_groups() -> None:
    """HSDP of 2 × 2 ranks, rank 3 hangs: rank 2 waits for its shard, ranks 0 and 1 elsewhere."""
    lines = [
        timeout(2, 410, "_REDUCE_SCATTER_BASE", group="2 PG GUID 4(dp_shard)", group_rank=0),
        timeout(1, 17, group="3 PG GUID 6(dp_replicate)", group_rank=0),
        timeout(0, 18, group="3 PG GUID 5(dp_replicate)", group_rank=0),
    ]
    found = diagnosed([start_of(4), *lines])
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 3)
    # Rank 3 also waits, somewhere: nothing can be said.
    found = diagnosed([start_of(4), *lines, timeout(3, 16, group=None, group_rank=1)])
    assert found.first is not None
    assert found.first.rank is None
    assert found.details == ()


@pytest.mark.parametrize(
    "second",
    [
        # https://github.com/vllm-project/vllm/issues/6042 (2.3)
        "[PG 1 Rank {rank}] Timeout at NCCL work: {number}, last enqueued NCCL work: 158046, last "
        "completed NCCL work: 158045.",
        # https://github.com/XPixelGroup/BasicSR/issues/737 (2.6)
        "[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception (either an error or timeout) "
        "detected by watchdog at work: {number}, last enqueued NCCL work: 811, last completed NCCL "
        "work: 807.",
        # https://github.com/ecmwf/WeatherGenerator/pull/1533 (2.8)
        "[PG ID 1 PG GUID 1 Rank {rank}]  failure detected by watchdog at work sequence id: "
        "{number} PG status: last enqueued work: 1119, last completed work: 1084",
    ],
)
def test_the_second_line_names_the_group_in_every_version(second: str) -> None:
    def lines(rank: int, number: int) -> list[str]:
        prefix = f"[rank{rank}]:[E{clock(1900)} ProcessGroupNCCL.cpp:1785] "
        return [
            timeout(rank, number, group=None),
            prefix + second.format(rank=rank, number=number),
        ]

    firsts = [lines(rank, 41 if rank == 2 else 42) for rank in range(4)]
    # The lines of all ranks of a node are mixed.
    found = diagnosed(
        [start_of(4), *(first for first, _ in firsts), *(group for _, group in firsts)]
    )
    assert found.first is not None
    assert found.first.rank == 2
    # The first lines alone do not show that it is one group.
    found = diagnosed([start_of(4), *(first for first, _ in firsts)])
    assert found.first is not None
    assert found.first.rank is None


def test_numbers_of_groups_that_are_local_are_not_compared() -> None:
    """Before 2.4 a group is named by its number on each rank: two of them may be group 1."""
    lines = []
    for rank in range(8):
        group, number = (1, 899 if rank == 4 else 900) if rank < 5 else (2, 900)
        first = timeout(rank, number, "_ALLGATHER_BASE", group=None, group_rank=rank % 4)
        lines += [
            first,
            f"[rank{rank}]:[E{clock(1900)} ProcessGroupNCCL.cpp:1537] [PG {group} Rank {rank % 4}] "
            f"Timeout at NCCL work: {number}, last enqueued NCCL work: {number}, last completed "
            f"NCCL work: {number - 1}.",
        ]
    found = diagnosed([start_of(8), *lines])
    assert found.first is not None
    assert found.first.rank is None
    assert found.details == ()


def test_ranks_without_a_prefix_are_those_of_their_groups() -> None:
    lines = [
        line.partition("]:")[2]
        for rank, number in ((0, 5), (1, 5), (0, 9))
        for line in [timeout(rank, number, group=None)]
    ]
    found = diagnosed([start_of(3), *lines])
    assert found.first is not None
    assert found.first.rank is None
    assert found.details == ()


def test_a_job_that_has_shrunk_misses_no_rank() -> None:
    size = "algo-1:101:400 [0] NCCL INFO comm 0x7f rank 0 nranks {} cudaDev 0 - Init COMPLETE"
    lines = [timeout(rank) for rank in range(7)]
    found = diagnosed([start_of(8), size.format(8), start_of(7), size.format(7), *lines])
    assert found.first is not None
    assert found.first.rank is None
    assert found.details == ()


def test_a_timeout_that_the_training_outlived_names_no_group() -> None:
    early = timeout(3, 41, "BROADCAST", group=None)
    lines = [timeout(rank, 41 if rank == 3 else 42) for rank in range(4)]
    found = diagnosed([start_of(4), early, *training(), start_of(4), *lines])
    assert found.first is not None
    assert found.first.rank == 3


def test_timeouts_of_many_ranks_in_one_log_are_all_read() -> None:
    lines = [timeout(rank) for rank in range(256) if rank != 200]
    found = diagnosed([start_of(256), *lines])
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 200)


def test_rank_that_lags_in_its_group_is_named_by_its_global_rank() -> None:
    lines = [
        timeout(
            8 + rank,
            41 if rank == 3 else 42,
            group="3 PG GUID 9(mesh_shard)",
            group_rank=rank,
        )
        for rank in range(8)
    ]
    other = [
        timeout(rank, 7, group="3 PG GUID 8(mesh_shard)", group_rank=rank) for rank in range(8)
    ]
    found = diagnosed([start_of(16), *other, *lines])
    assert found.first is not None
    assert found.first.rank == 11
    assert found.details == (
        "group mesh_shard: the ranks wait in different collectives: rank 11 in ALLREDUCE 41; "
        "ranks 8, 9, 10, 12, 13, 14, 15 in ALLREDUCE 42",
    )


def test_echoes_alone_are_unknown_with_up_to_ten_lines_of_evidence() -> None:
    found = diagnosed([*training(), *echoes(range(8))], [*training(1), *echoes(range(8, 16))])
    assert found.cause == "efa-request-error"
    only = [line for line in echoes(range(8)) if not line.startswith("NET/OFI")]
    found = diagnosed([*training(), *only], [*training(1), *only])
    assert (found.cause, found.confidence, found.first) == ("unknown", None, None)
    assert 4 <= len(found.evidence) <= 10
    with_report = diagnosed([*training(), *only, *torchrun_report(6, 3)])
    assert (with_report.cause, with_report.first) == ("unknown", None)
    assert with_report.details == ("torchrun saw rank 6 fail first, exit code 3",)
    assert {match.stream for match in found.evidence} == {"algo-1.log", "algo-2.log"}


def test_title_of_an_unknown_cause_is_the_last_error_near_the_end() -> None:
    error = "the worker failed to start, giving up"
    found = diagnosed([*training(), error])
    assert (found.cause, found.title) == (
        "unknown",
        f"Unknown cause; the last error is: {error}",
    )
    quiet = diagnosed([*training(), error, *["loading"] * 30])
    assert (quiet.cause, quiet.title) == ("unknown", "The logs do not show the cause")


def test_error_event_provides_node_rank_and_time() -> None:
    event = format_event(
        "error",
        {"code": "DataError", "message": "DataError: 120 of 4000 samples cannot be used (x 120)"},
        time=BEGIN + 100.5,
        node=1,
        rank=9,
    )
    found = diagnose([stream([*training(), event], "events.log", None)])
    assert found.cause == "bad-samples"
    assert found.first is not None
    assert (found.first.node, found.first.rank, found.first.time) == ("algo-2", 9, BEGIN + 100.5)


def test_successful_run_has_no_failure_despite_earlier_errors() -> None:
    for end in (
        "2026-11-22 10:00:01,123 sagemaker-training-toolkit INFO     Reporting training SUCCESS",
        DONE,
    ):
        found = diagnosed([*HEALTHY, *traceback(OOM), *echoes(range(8)), end], echoes(range(8, 9)))
        assert found.cause == "no-failure"
        assert "succeeded" in found.title


def test_stall_explains_max_runtime_but_not_out_of_memory() -> None:
    stall = format_event(
        "warning",
        {"code": "stall", "message": "no step for 1804 s"},
        time=BEGIN + 1900,
        node=0,
        rank=5,
    )
    ended = ["2026-11-22T20:00:00Z SecondaryStatus: MaxRuntimeExceeded"]
    found = diagnosed([*training(), stall], ended)
    assert found.cause == "stall"
    assert found.first is not None
    assert found.first.rank == 5
    beats = ["SMT heartbeats of the other ranks"] * 500
    assert diagnosed([*training(), *traceback(OOM, 3), *beats, stall], ended).cause != "stall"
    assert diagnosed(training(), ended).cause == "max-runtime"


def test_stall_killed_by_the_watchdog_is_attributed_to_the_blamed_rank() -> None:
    """The watchdog logs a warning, then an error with the same code, and kills the hung process."""
    message = "no heartbeat for 300 s in step after step 40; rank 9 keeps the others waiting"
    event = (
        'SMT {{"kind": "{}", "time": {}, "node": 0, "rank": 0, "code": "stall", '
        '"message": "{}", "blamed_rank": 9, "blamed_node": 1}}'
    )
    found = diagnosed(
        [
            step(40, 10.0),
            event.format("warning", 310.0, message),
            event.format("error", 310.1, message),
        ],
        [step(40, 10.0, rank=8, node=1), "failed (exitcode: -9) local_rank: 1 (pid: 120)"],
    )
    assert (found.cause, found.retryable) == ("stall", True)
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 9)


def test_nonfinite_loss_is_reported_unless_it_recovers() -> None:
    nonfinite = [f"step {number} loss nan lr 1.0e-04" for number in range(100, 200)]
    assert diagnosed([*training(), *nonfinite]).cause == "loss-non-finite"
    finite = [f"step {number} loss 0.3 lr 1.0e-04" for number in range(200, 210)]
    assert is_left_alone(diagnosed([*training(), *nonfinite, *finite]))
    assert (
        diagnosed([*training(), *nonfinite, *traceback("KeyError: 'x'")]).cause == "program-error"
    )


def test_second_start_in_one_log_is_another_attempt() -> None:
    start = {
        "run": "r",
        "stage": "s",
        "resolution": 256,
        "world_size": 8,
        "nodes": 1,
        "per_device_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "effective_batch_size": 8,
        "max_steps": 9,
        "parameters": 1,
        "backend": "nccl",
        "backend_reason": "",
        "precision": "bf16",
        "resumed_from_step": 0,
    }
    begin = format_event("start", start, time=BEGIN, node=0, rank=0)
    found = diagnosed([begin, *traceback(OOM), begin, *traceback("KeyError: 'x'")])
    assert found.cause == "program-error"


def test_last_attempt_is_diagnosed_and_earlier_ones_are_listed() -> None:
    first = stream([*training(), *traceback(OOM)], "algo-1-1700000000")
    last = stream([*training(), "Loss is nan, stopping training"], "algo-1-1700009000")
    found = diagnose([last], [[first]])
    assert found.cause == "diverged"
    assert found.details[0] == "attempt 1: The GPU ran out of memory (gpu-out-of-memory)"


def test_mpirun_prefix_provides_node_and_rank() -> None:
    lines = [
        "[1,mpirank:3,algo-1]<stderr>:Traceback (most recent call last):",
        '[1,mpirank:3,algo-1]<stderr>:  File "train.py", line 1, in <module>',
        "[1,mpirank:11,algo-2]<stderr>:Traceback (most recent call last):",
        '[1,mpirank:11,algo-2]<stderr>:  File "train.py", line 1, in <module>',
        "[1,mpirank:11,algo-2]<stderr>:ValueError: bad caption",
        "[1,mpirank:3,algo-1]<stderr>:ConnectionResetError: [Errno 104] Connection reset by peer",
        "MPI_ABORT was invoked on rank 11 in communicator MPI_COMM_WORLD",
    ]
    found = diagnose([stream([*HEALTHY, *lines])])
    assert found.cause == "program-error"
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 11)


def test_shells_message_after_another_bar_is_found() -> None:
    bar = "45/100 [====>.....] - ETA: 1:20 - loss: 0.3451"
    assert diagnosed([*HEALTHY, bar + "Segmentation fault (core dumped)"]).cause == "segfault"


def test_started_process_whose_parent_failed_is_no_cause() -> None:
    frames = ['  File "spawn.py", line 126, in _main', "    self = pickle.load(from_parent)"]
    child = ["Traceback (most recent call last):", *frames, "EOFError: Ran out of input"]
    parent = traceback("AttributeError: Can't pickle local object 'main.<locals>.collate'")
    assert diagnosed(child).cause == "unknown"
    assert diagnosed([*child, *parent]).cause == "process-start"
    # The frames of multiprocessing are left out.
    child[1:3] = ['  File "<string>", line 1, in <module>']
    assert diagnosed([*parent, *child]).cause == "process-start"


PENDING = (
    "Warning  FailedScheduling  9m  default-scheduler  0/3 nodes are available: 3 Insufficient gpu."
)
NO_IMAGE = 'Warning  Failed  9m  kubelet  Failed to pull image "train:1": connection reset'


@pytest.mark.parametrize(
    ("failed", "later", "cause"),
    [
        (PENDING, "Normal  TriggeredScaleUp  8m  cluster-autoscaler  pod triggered", "capacity"),
        (PENDING, "Normal  Scheduled  2m  default-scheduler  Successfully assigned w-0", UNKNOWN),
        (PENDING, "Normal  Started  1m  kubelet  Started container pytorch", UNKNOWN),
        (PENDING, f"[rank3]: {OOM}", "gpu-out-of-memory"),
        (NO_IMAGE, "Normal  Pulled  1m  kubelet  Successfully pulled image train:1", UNKNOWN),
        (NO_IMAGE, "Normal  Scheduled  9m  default-scheduler  Assigned w-0", "image-pull"),
    ],
)
def test_failure_before_the_start_may_be_resolved(failed: str, later: str, cause: str) -> None:
    assert diagnosed([failed, later]).cause == cause
    assert not any("seen 0" in detail for detail in diagnosed([*HEALTHY, later]).details)


def test_progress_bar_that_is_redrawn_at_the_end_is_no_further_step() -> None:
    error = "Exception: Current loss scale already at minimum - cannot decrease scale anymore."
    bar = "  4%|▍         | {}/387 [05:25<1:57:56, 19.13s/it]"
    assert diagnosed([bar.format(16), *traceback(error), bar.format(17)]).cause == "diverged"
    later = [bar.format(number) for number in range(17, 21)]
    assert is_left_alone(diagnosed([bar.format(16), *traceback(error), *later]))


def test_first_exception_of_a_chain_counts_without_its_traceback() -> None:
    chained = "During handling of the above exception, another exception occurred:"
    found = diagnosed([*training(), OOM, "", chained, "", *traceback("KeyError: 'step'")])
    assert found.cause == "gpu-out-of-memory"


def test_error_message_of_sagemakers_launcher_is_an_exception() -> None:
    found = diagnosed(
        ["ExitCode 1", """ErrorMessage "ModuleNotFoundError: No module named 'av'\""""]
    )
    assert (found.cause, found.confidence) == ("module-missing", "high")


@pytest.mark.parametrize(
    ("lines", "rank"),
    [
        (["NVRM: Xid (PCI:0000:10:1c): 79, GPU has fallen off the bus."], None),
        (
            [
                "NVRM: Xid (PCI:0000:10:1c): 79, GPU has fallen off the bus.",
                "[rank6]: RuntimeError: CUDA error: unspecified launch failure",
                timeout(3),
            ],
            6,
        ),
        (
            [
                "ERROR: Unexpected bus error encountered in worker. This might be caused by "
                "insufficient shared memory (shm).",
                "[rank1]: RuntimeError: DataLoader worker (pid 151) is killed by signal: Bus error.",  # noqa: E501
            ],
            1,
        ),
        (
            [
                "slurmstepd: error: Detected 1 oom_kill event in StepId=339.0. Some of the step "
                "tasks have been OOM Killed.",
                "srun: error: gpu-12: task 2: Out Of Memory",
                "srun: error: gpu-12: tasks 0-1,3: Terminated",
            ],
            2,
        ),
        # The tasks are launchers of several ranks.
        (["srun: error: gpu-12: task 2: Out Of Memory", timeout(17)], None),
    ],
)
def test_rank_is_that_of_a_consequence_on_the_same_node(lines: list[str], rank: int | None) -> None:
    found = diagnose([stream(lines, "job.log", None)])
    assert found.first is not None
    assert found.first.rank == rank


def test_error_after_a_progress_bar_is_found() -> None:
    bar = "\r  5%|▌         | 72/1398 [1:12:34<24:31:08, 66.57s/it]" * 3
    found = diagnosed([*HEALTHY, bar + OOM])
    assert found.cause == "gpu-out-of-memory"


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_block_size_does_not_matter(size: int) -> None:
    lines = [*training(), *traceback(OOM, rank=1), *echoes(range(4)), *torchrun_report(1, 1)]
    content = "\n".join(lines).encode()
    blocks = [content[start : start + size] for start in range(0, len(content), size)]
    expected = scan(stream(lines))
    report = scan(stream(lines).__class__("algo-1.log", lambda: blocks, "algo-1", WRITTEN))
    assert (report.matches, report.lines) == (expected.matches, expected.lines)
    assert expected.lines == len(lines)


def watchdog_event(code: str, rank: int, **fields: object) -> str:
    return format_event(
        "warning", {"code": code, "message": code} | fields, time=BEGIN + 110, node=0, rank=rank
    )


def test_resolved_stall_is_not_the_cause_of_a_later_death() -> None:
    """The run stalled, resumed and trained on until one rank was killed."""
    lines = [
        *training(until=100),
        watchdog_event("stall", 0, blamed_rank=3, blamed_node=0),
        watchdog_event("stall-resolved", 0, step=100, silent_seconds=8.8),
        step(101, BEGIN + 120),
    ]
    assert is_left_alone(diagnosed(lines))
    found = diagnosed([*lines, watchdog_event("rank-died", 0, step=101, rank_died=1)])
    assert found.cause == "rank-died"
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-1", 1)
    unresolved = [*lines[:-2], watchdog_event("stall", 0, blamed_rank=2, blamed_node=0)]
    assert diagnosed(unresolved).cause == "stall"


def test_rank_that_died_outranks_connection_errors_of_the_others() -> None:
    refused = "RuntimeError: [gloo/transport/tcp/pair.cc:799] connect [10.0.1.5]:13195: refused"
    for other in (refused, *echoes(range(1)), timeout(2)):
        found = diagnosed(
            [*training(), *traceback(other, rank=2)],
            [*training(1), watchdog_event("rank-died", 8, step=99, rank_died=11)],
        )
        assert found.cause == "rank-died"
        assert found.first is not None
        assert (found.first.node, found.first.rank) == ("algo-2", 11)
    kernel = "[18026.2] Out of memory: Killed process 1203 (python3) total-vm:120832kB"
    found = diagnosed([*training(), watchdog_event("rank-died", 0, rank_died=1), kernel])
    assert found.cause == "host-out-of-memory"


def failed_locally(local_rank: int, code: int = 1) -> str:
    return f"failed (exitcode: {code}) local_rank: {local_rank} (pid: 1203) of binary: python"


@pytest.mark.parametrize("node", range(4))
@pytest.mark.parametrize("code", [1, -9])
def test_rank_follows_from_the_local_rank_and_other_lines_of_the_nodes(
    node: int, code: int
) -> None:
    """Nodes of 8 ranks, whose tracebacks name no rank."""
    logs = [
        [*training(number), *echoes(range(8 * number, 8 * number + 8), second=105)]
        for number in range(4)
    ]
    logs[node] = [
        *training(node),
        *(traceback("KeyError: 'caption'") if code == 1 else []),
        failed_locally(5, code),
        *(
            echoe
            for echoe in echoes(range(8 * node, 8 * node + 8))
            if f"rank{8 * node + 5}" not in echoe
        ),
    ]
    found = diagnosed(*logs)
    assert found.cause == ("program-error" if code == 1 else "process-killed")
    assert found.first is not None
    assert (found.first.node, found.first.rank) == (f"algo-{node + 1}", 8 * node + 5)


def test_nodes_of_twelve_are_in_the_order_of_their_names_as_text() -> None:
    names = host_names(12)
    logs = {
        name: echoes(range(8 * number, 8 * number + 8), second=105)
        for number, name in enumerate(names)
    }
    logs["algo-10"] = [*traceback("KeyError: 'caption'"), failed_locally(5)]
    found = diagnose([stream(lines, f"{name}.log", name) for name, lines in logs.items()])
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-10", 8 * names.index("algo-10") + 5)
    assert found.first.rank == 13


def test_rank_is_unknown_if_the_ranks_per_node_are() -> None:
    found = diagnosed([*training()], [*training(1), *traceback("KeyError: 'x'"), failed_locally(1)])
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", None)
    [single] = [[*traceback("KeyError: 'x'"), failed_locally(1)]]
    found = diagnose([stream(single, "job.log", None)])
    assert found.first is not None
    assert found.first.rank == 1


@pytest.mark.parametrize("skew", [-300, -30, 0, 30, 300])
def test_uncaught_exception_counts_whatever_the_clocks_of_other_nodes_say(skew: int) -> None:
    failing = [
        *training(1),
        *(
            f"{datetime.fromtimestamp(BEGIN + 100 + skew, UTC).isoformat()} [rank9]: {line}"
            for line in traceback("KeyError: 'caption'")
        ),
    ]
    found = diagnosed([*training(until=100), *echoes(range(8))], failing)
    assert found.cause == "program-error"
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-2", 9)


@pytest.mark.parametrize("skew", [-30, 0, 30])
def test_program_error_outranks_refused_connections_on_other_nodes(skew: int) -> None:
    def at(second: int, text: str) -> str:
        return f"{datetime.fromtimestamp(BEGIN + second, UTC).isoformat()} {text}"

    refused = "RuntimeError: [gloo/transport/tcp/pair.cc:799] connect [10.0.1.5]:13195: refused"
    logs = [
        [at(100, f"[rank{8 * node}]: {line}") for line in traceback(refused)] for node in range(4)
    ]
    logs[2] = [at(101 + skew, f"[rank17]: {line}") for line in traceback("KeyError: 'caption'")]
    found = diagnosed(*logs)
    assert found.cause == "program-error"
    assert found.first is not None
    assert (found.first.node, found.first.rank) == ("algo-3", 17)


def test_abort_of_nccl_is_not_the_cause() -> None:
    aborted = "failed (exitcode: -6) local_rank: 0 (pid: 2625) of binary: /opt/conda/bin/python"
    assert diagnosed([*training(), timeout(3), aborted]).cause == "nccl-timeout"
    assert diagnosed([*training(), aborted]).cause == "aborted"
    assert diagnosed([*training(), *traceback("KeyError: 'x'"), aborted]).cause == "program-error"


def test_repeated_progress_bar_is_no_further_step() -> None:
    bar = "  3%|▎         | 30/1000 [00:30<16:10,  1.00s/it]"
    found = diagnosed(
        [*training(), bar, "RuntimeError: CUDA error: device-side assert triggered", bar]
    )
    assert found.cause == "cuda-device-assert"


def test_message_that_ends_the_job_counts_despite_buffered_steps() -> None:
    killed = "slurmstepd: error: Job 7518 exceeded memory limit (6263599 > 5120000), being killed"
    assert diagnosed([*training(), killed, step(101, WRITTEN)]).cause == "host-out-of-memory"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("lmdb.Error: /data/CVPR2016/: Stale file handle", "file-system-lost"),
        ("cv2.error: no space left on the device while writing", "disk-full"),
        ("MyClientError: 503 from the service: temporarily unavailable", "http-server-error"),
        ("OSError: (External) CUBLAS error(13).", "cublas-error"),
        ("KeyError: 'no space left on device'", "program-error"),
        ("ValueError: batch_size must be positive", "invalid-config"),
    ],
)
def test_mention_of_a_failure_in_an_uncaught_exception_names_it(error: str, cause: str) -> None:
    assert diagnosed([*training(), *traceback(error)]).cause == cause
    assert diagnosed([*training(), error]).cause == cause


def test_launchers_exception_does_not_hide_the_programs() -> None:
    found = diagnosed(
        [
            *training(),
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            *traceback(
                "subprocess.CalledProcessError: Command '['python', 'train.py']' returned "
                "non-zero exit status 1."
            ),
        ]
    )
    assert found.cause == "gpu-out-of-memory"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("worker 3: exit code 137", "process-killed"),
        ("Main process exited, code=dumped, status=11/SEGV", "segfault"),
        (
            "ProcessExitedException: process 2 terminated with signal SIGBUS",
            "bus-error",
        ),
        ("Closing process 4242 via signal SIGTERM, forcefully exiting via SIGKILL", UNKNOWN),
        ("Killing global rank 2 (PID 423) with SIGKILL", UNKNOWN),
        ("exit code 137.5 ms", UNKNOWN),
    ],
)
def test_signal_is_recognized_unless_a_launcher_sends_it(line: str, cause: str) -> None:
    assert diagnosed([*training(), line]).cause == cause


IN_LIBRARY = '  File "/opt/conda/lib/site-packages/diffusers/unet.py", line 88, in forward'
IN_SCRIPT = '  File "/opt/ml/code/train.py", line 88, in main'
OPENED = "Traceback (most recent call last):"


def test_kind_of_a_program_error_names_its_parent_and_shows_the_line() -> None:
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (154x2048 and 768x320)"
    found = diagnosed([*training(), OPENED, IN_LIBRARY, error])
    assert (found.cause, found.parent) == ("shape-mismatch", "program-error")
    assert error in found.title
    oom = diagnosed([*training(), OPENED, IN_LIBRARY, "RuntimeError: CUDA error: out of memory"])
    assert (oom.cause, oom.parent) == ("gpu-out-of-memory", None)


@pytest.mark.parametrize("frame", [IN_SCRIPT, IN_LIBRARY])
def test_only_a_mistake_in_programming_is_certainly_one(frame: str) -> None:
    for error, confidence in (
        ("RuntimeError: the sky is too grey", "low"),
        ("KeyError: 'cloud'", "medium"),
        ("AssertionError", "medium"),
        ("AssertionError: the sky is too grey", "low"),
    ):
        found = diagnosed([*training(), OPENED, frame, error])
        assert (found.cause, found.confidence) == ("program-error", confidence)


def test_attribute_that_a_library_lacks_is_a_mismatch_of_versions() -> None:
    error = "AttributeError: 'Linear' object has no attribute 'set_lora_layer'"
    assert diagnosed([*training(), OPENED, IN_LIBRARY, error]).cause == "api-mismatch"
    assert diagnosed([*training(), OPENED, IN_SCRIPT, error]).cause == "program-error"


@pytest.mark.parametrize("prefix", ["", "train-worker-1 pytorch ", "[default0]:", "12:30:01 | "])
def test_traceback_is_found_though_its_first_lines_are_missing(prefix: str) -> None:
    error = "KeyError: 'text_embeds'"
    tail = [
        IN_LIBRARY,
        "    return hidden_states",
        IN_SCRIPT,
        "    main()",
        error,
        *torchrun_report(0, 1),
    ]
    found = diagnosed([prefix + line for line in tail])
    assert (found.cause, found.confidence) == ("program-error", "medium")
    assert error in found.title


def test_known_kind_of_a_direct_cause_remains() -> None:
    chain = [
        OPENED,
        IN_SCRIPT,
        "FileNotFoundError: [Errno 2] No such file or directory: 'meta.jsonl'",
    ]
    cause = "The above exception was the direct cause of the following exception:"
    wrapper = [OPENED, IN_SCRIPT, "RuntimeError: the sky is not usable"]
    assert diagnosed([*training(), *chain, "", cause, "", *wrapper]).cause == "file-missing"
    handled = "During handling of the above exception, another exception occurred:"
    assert diagnosed([*training(), *chain, "", handled, "", *wrapper]).cause == "program-error"


def test_exception_that_training_outlived_is_no_failure() -> None:
    steps = [step(number, WRITTEN + number) for number in range(200, 210)]
    for error in ("KeyError: 'x'", "RuntimeError: the sky is too grey"):
        assert is_left_alone(diagnosed([*training(), OPENED, IN_SCRIPT, error, *steps]))


# ------------------------------------------------------------------ messages without a signature

FRAME_OF_OPEN_MPI = "-" * 74


def training_then(*lines: str) -> list[str]:
    return [*(step(number, WRITTEN - 100 + number) for number in range(9)), *lines]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("srun: error: A message of a future version of SLURM", "slurm-launch"),
        ("slurmstepd: error: A message of a future version", "slurm-launch"),
        ("algo-1:40:90 [2] graph/topo.cc:88 NCCL WARN Could not find a path", "network-library"),
        ("libfabric:40:170:efa:cq:efa_cq():88<warn> Failed to read the queue", "network-library"),
        ("[1634112345.1] [host-3:12 :0]  ib.c:143  UCX  ERROR cannot create QP", "network-library"),
        ("start.sh: line 12: export: `-x': not a valid identifier", "script-error"),
    ],
)
def test_last_line_is_attributed_to_the_program_that_wrote_it(line: str, cause: str) -> None:
    found = diagnosed(training_then(line))
    assert (found.cause, found.confidence) == (cause, "low")
    further_steps = [step(number, WRITTEN + number) for number in range(9, 15)]
    assert is_left_alone(diagnosed([*training_then(line), *further_steps]))


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Ignoring an option",
        "algo-1:40:90 [2] NCCL WARN NCCL_CROSS_NIC set by environment",
        "libfabric:40:170:efa:core:efa():88<warn> FI_HMEM capability requires RDMA",
        "start.sh: line 1: warning: setlocale: LC_ALL: cannot change locale",
    ],
)
def test_last_line_that_ends_nothing_is_no_cause(line: str) -> None:
    assert is_left_alone(diagnosed(training_then(line)))


def test_message_of_open_mpi_is_recognized_by_its_frame() -> None:
    text = ["The value of an option of a future version is out of range:", "", "  Option: x"]
    found = diagnosed(training_then(FRAME_OF_OPEN_MPI, *text, FRAME_OF_OPEN_MPI))
    assert (found.cause, found.confidence) == ("mpi-error", "low")
    assert found.evidence[0].text.startswith("The value of an option")
    warning = ["WARNING: No preset parameters were found", "for the device."]
    assert is_left_alone(diagnosed(training_then(FRAME_OF_OPEN_MPI, *warning, FRAME_OF_OPEN_MPI)))


def test_exception_whose_handler_fails_with_an_unset_variable_is_the_cause() -> None:
    lines = [
        *traceback("omegaconf.errors.ConfigAttributeError: Missing key model"),
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *traceback("NameError: name 'trainer' is not defined"),
    ]
    assert diagnosed(lines).cause == "invalid-config"


def test_list_of_possible_causes_is_no_evidence() -> None:
    line = (
        "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer"
    )
    assert is_left_alone(diagnosed([line]))


def test_network_without_rdma_is_a_warning_of_its_node() -> None:
    def channels(node: int, rdma: int) -> list[str]:
        return [
            f"algo-{node}:73:95 [0] NCCL INFO Channel {index:02}/0 : 0[0] -> 8[0] [send] via "
            f"NET/IB/0{'/GDRDMA' if index < rdma else ''}"
            for index in range(16)
        ]

    reason = "NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)"
    lines = [*channels(1, 16), f"algo-2:73:95 [0] {reason}", *channels(2, 1), *traceback(OOM, 3)]
    found = diagnosed(lines)
    [warning] = [line for line in found.details if "RDMA" in line]
    assert warning.startswith("warning: algo-2: InfiniBand, GPUDirect RDMA on 1 of 16 channels")
    assert "(no module)" in warning
    assert found.cause == "gpu-out-of-memory"


MYSQL_KILLED = (
    "[18026.2] mysqld invoked oom-killer: gfp_mask=0x140cca, order=0, oom_score_adj=0",
    "[18026.2]  oom_kill_process+0x10a/0x1b0",
    "[18026.3] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=mysqld,pid=81233,uid=27",
    "[18026.3] Out of memory: Killed process 81233 (mysqld) total-vm:9012kB, anon-rss:8000kB",
    "mysql.service: Failed with result 'oom-kill'.",
)
BAD_VALUE = "ValueError: too many values to unpack (expected 2)"


@pytest.mark.parametrize(
    "others",
    [
        MYSQL_KILLED,
        # Python needed memory, and another program was killed for it.
        ("[18026.2] python3 invoked oom-killer: gfp_mask=0x140cca, order=0", *MYSQL_KILLED[2:]),
        ("[90.1] NVRM: Xid (PCI:0000:2b:00): 31, pid=81233, name=Xorg, channel 0x2, MMU Fault",),
        ("[90.1] node[81233]: segfault at 0 ip 00007f3c sp 00007ffd error 4 in libv8.so",),
        ("[90.1] traps: dockerd[81233] general protection fault ip:55d sp:7ff error:0",),
    ],
    ids=lambda others: others[0][7:30],
)
def test_kernel_messages_about_other_programs_are_notes(others: tuple[str, ...]) -> None:
    found = diagnosed([*training(), *others, *traceback(BAD_VALUE, 3)])
    assert found.parent == "program-error" or found.cause == "program-error"
    assert found.evidence[0].text == BAD_VALUE
    assert any("about a program other than the job's" in line for line in found.details)
    # A training that ended well stays a success.
    ended = diagnosed([*training(), DONE, *others])
    assert ended.cause == "no-failure"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        # By its name.
        ([MYSQL_KILLED[3].replace("mysqld", "python3")], "host-out-of-memory"),
        ([MYSQL_KILLED[3].replace("mysqld", "pt_data_worker")], "host-out-of-memory"),
        (["slurmstepd: error: Detected 1 oom_kill event in StepId=7.0."], "host-out-of-memory"),
        # By its process id, which the job's own log mentions.
        (
            ["algo-1:81233:81240 [0] NCCL INFO Using network IB", MYSQL_KILLED[3]],
            "host-out-of-memory",
        ),
        # A machine-wide event needs no owner.
        (
            ["NVRM: Xid (PCI:0000:06:00): 79, pid=81233, name=Xorg, GPU has fallen off the bus."],
            "xid-79",
        ),
        # One victim of two is the job's.
        ([*MYSQL_KILLED, MYSQL_KILLED[3].replace("mysqld", "python3")], "host-out-of-memory"),
    ],
)
def test_kernel_messages_about_the_job_are_its_cause(lines: list[str], cause: str) -> None:
    assert diagnosed([*training(), *lines]).cause == cause


def test_a_reason_outranks_the_status_next_to_it() -> None:
    lost = (
        "Warning  UnexpectedAdmissionError  4s  kubelet  Allocate failed due to device plugin "
        "GetPreferredAllocation rpc failed with err: rpc error: code = Unknown desc = Unable to "
        "retrieve list of available devices: error creating nvml.Device 5: nvml: GPU is lost, "
        "which is unexpected"
    )
    taken = (
        'failed with reason: "UnexpectedAdmissionError", message: "Pod Allocate failed due to '
        "requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0, "
        'which is unexpected"'
    )
    status = "train-worker-1   0/1     UnexpectedAdmissionError   0          4s"
    for lines, code in (([status, lost], "gpu-lost"), ([lost], "gpu-lost"), ([taken], "capacity")):
        assert diagnosed(lines).cause == code
    assert diagnosed([status]).cause == "pod-rejected"


def test_a_hub_that_is_slow_is_not_a_hub_that_cannot_be_reached() -> None:
    slow = (
        "requests.exceptions.ReadTimeout: (ReadTimeoutError(\"HTTPSConnectionPool(host='hugging"
        "face.co', port=443): Read timed out. (read timeout=10)\"), '(Request ID: 7d76f590)')"
    )
    absent = (
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
        "find them in the cached files."
    )
    found = diagnosed([*traceback(slow), *traceback(absent)])
    assert (found.cause, found.retryable) == ("hub-timeout", True)
    found = diagnosed(traceback(absent))
    assert (found.cause, found.retryable) == ("hub-offline", False)
