"""A node's counters, read from a fake ``/proc`` and ``/sys`` and a fake GPU driver."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatReader, HeartbeatWriter, Phase
from sm_train.entrypoints.monitoring.node_event import NodeReport
from sm_train.entrypoints.monitoring.node_metrics import NodeCounters, Reading, event_fields, rates
from sm_train.entrypoints.monitoring.procfs import descendants, describe, read_bytes, state
from sm_train.toolkit.records.job_logs import parse_event

NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: {lo} 1 0 0 0 0 0 0 {lo} 1 0 0 0 0 0 0
  eth0:{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0
  eth1: 0 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0
"""


def write_counters(root: Path, scale: int) -> None:
    """Write the counters after ``scale`` units of work."""
    files = {
        "proc/net/dev": NET.format(lo=scale * 999, received=scale * 1000, sent=scale * 500),
        "proc/diskstats": f" 259 0 nvme0n1 1 0 {scale * 8} 0 1 0 {scale * 4} 0 0 0 0\n"
        f" 259 1 nvme0n1p1 1 0 {scale * 8} 0 1 0 {scale * 4} 0 0 0 0\n",
    }
    for device in ("rdmap0s1", "rdmap0s2"):
        counters = f"sys/class/infiniband/{device}/ports/1/hw_counters"
        files[f"{counters}/rx_bytes"] = f"{scale * 100}\n"
        files[f"{counters}/rx_drops"] = f"{scale}\n"
        files[f"{counters}/lifespan"] = "not a counter\n"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "sys/block/nvme0n1").mkdir(parents=True, exist_ok=True)


class Clock:
    now = 10**12

    def __call__(self) -> int:
        return self.now


class NVMLError(Exception):
    pass


def fake_nvml(scale: int, *, ecc: bool) -> Any:
    """Return a stand-in for pynvml; without ECC it raises the driver's error."""

    def errors(handle: int, kind: int, counter: int) -> int:
        if not ecc:
            raise NVMLError("Not Supported")
        return 3 if kind else 0

    def fields(handle: int, field_ids: list[tuple[int, int]]) -> list[Any]:
        return [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=scale * 10))
            for _ in field_ids
        ]

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_SUCCESS=0,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=138,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=139,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=10**9 * (1 + handle)),
        nvmlDeviceGetTemperature=lambda handle, sensor: 60 + handle,
        nvmlDeviceGetClockInfo=lambda handle, clock: 1400 - 100 * handle,
        nvmlDeviceGetPowerUsage=lambda handle: 400_000,
        nvmlDeviceGetTotalEccErrors=errors,
        nvmlDeviceGetFieldValues=fields,
    )


@pytest.mark.parametrize("ecc", [True, False])
def test_event_has_rates_and_gpu_extremes(tmp_path: Path, ecc: bool) -> None:
    readings = []
    for scale, now in ((1, 100.0), (5, 102.0)):
        write_counters(tmp_path, scale)
        counters = NodeCounters(tmp_path, fake_nvml(scale, ecc=ecc), [0, 1])
        readings.append(counters.read(now, []))
    fields = event_fields(*readings)
    assert fields["network_receive_bytes_per_second"] == 2000
    assert fields["network_send_bytes_per_second"] == 1000
    assert fields["efa_receive_bytes_per_second"] == 400
    assert fields["efa_drops"] == 8
    assert fields["efa_retransmits"] is None
    # Whole devices only: a partition's sectors count for its device, too.
    assert fields["disk_read_bytes_per_second"] == 512 * 8 * 2
    assert fields["disk_write_bytes_per_second"] == 512 * 4 * 2
    # Two GPUs, two directions, in KiB.
    assert fields["nvlink_bytes_per_second"] == 1024 * 10 * 4 * 4 / 2
    assert fields["gpu_utilization_mean"] == 90.5
    assert fields["gpu_utilization_min"] == 90
    assert fields["gpu_temperature_max"] == 61
    assert fields["gpu_clock_min"] == 1300
    assert fields["gpu_memory_used_max"] == 2e9
    assert fields["gpu_ecc_uncorrected"] == (6 if ecc else None)
    assert [gpu["gpu"] for gpu in fields["gpus"]] == [0, 1]


def test_figures_are_none_without_gpu_and_efa(tmp_path: Path) -> None:
    readings = [NodeCounters(tmp_path).read(now, [os.getpid()]) for now in (0.0, 1.0)]
    fields = event_fields(*readings)
    assert fields["efa_receive_bytes_per_second"] is None
    assert fields["gpu_utilization_mean"] is None
    assert fields["gpus"] == []


def test_node_event_holds_the_times_of_every_rank_in_one_atomic_line(tmp_path: Path) -> None:
    """With eight ranks and eight GPUs: a pipe splits lines of more than 4 KiB."""
    clock, ranks, stream = Clock(), [], io.StringIO()
    for rank in range(8):
        path = tmp_path / f"heartbeat-{rank}"
        ranks.append(
            (HeartbeatWriter(path, rank=rank, local_rank=rank, clock=clock), HeartbeatReader(path))
        )
    counters = NodeCounters(tmp_path, fake_nvml(1, ecc=True), list(range(8)))
    report = NodeReport(EventLog(node=15, rank=120, stream=stream), 15, lambda: counters)
    row = {"rank": 120, "node": 15, "busy_seconds": 0.123456, "ratio": 1.23456}
    skew = {"node": 15, "seconds": 0.123456}
    job = {"straggler_ratio": 1.23456, "stragglers": 4 * [row], "arrival_skew": 4 * [skew]}
    for round_ in range(2):
        write_counters(tmp_path, 10**9 + round_ * 10**9)
        for rank, (writer, _) in enumerate(ranks):
            started = clock.now
            for step in range(100):
                writer.enter(Phase.DATA, round_ * 100 + step)
                clock.now += 10**8
                writer.enter(Phase.STEP, round_ * 100 + step)
                clock.now += 3 * 10**8 if rank == 5 else 10**8
                writer.add_busy(2 * 10**8 + rank * 10**6, 10**7)
            clock.now = started
        clock.now += 4 * 10**10
        report.measure([reader for _, reader in ranks], clock.now / 1e9, job)
    [event] = [parsed for line in stream.getvalue().splitlines() if (parsed := parse_event(line))]
    assert len(stream.getvalue().encode()) < 4096
    assert event["ranks"][5]["p50"] == pytest.approx(0.4, rel=0.07)
    assert event["ranks"][5]["busy_seconds"] == pytest.approx(0.205)
    assert event["ranks"][5]["cpu_wait_seconds"] == pytest.approx(0.01)
    assert event["straggler_ratio"] == pytest.approx(1.235)
    assert event["stragglers"][3]["ratio"] == pytest.approx(1.235)
    assert event["ranks"][5]["data_wait_share"] == pytest.approx(0.25, rel=0.02)
    assert event["data_wait_share_max"] == pytest.approx(0.25, rel=0.02)
    assert event["gpu_utilization_mean"] == 93.5
    assert len(event["gpus"]) == 8


def test_reset_counter_has_no_rate() -> None:
    before, now = Reading(0, {"a": 5, "b": 5}), Reading(1, {"a": 4, "b": 7, "new": 1})
    assert rates(before, now) == {"b": 2}
    assert rates(now, now) == {}


def test_counters_of_this_computer_can_be_read() -> None:
    """Read the kernel's real files, whatever the hardware is."""
    reading = NodeCounters.open().read(0.0, [os.getpid()])
    assert reading.counters["files_read"] > 0
    assert {"network_receive", "disk_read"} <= reading.counters.keys()
    assert state(os.getpid()) == "R"
    assert state(2**22 + 1) == "X"
    assert os.getpid() in descendants(os.getppid())
    assert "State: R" in describe(os.getpid())
    assert read_bytes(2**22 + 1) == 0
