"""Metrics of a node's network, disks and GPUs, which CloudWatch lacks for training jobs.

These are counters of the kernel and the GPU driver, read at a low rate; a rate is the difference of
two readings. What is unavailable (no EFA, no GPU, an old driver) is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from sm_train.entrypoints.monitoring import procfs

Counters = dict[str, int]


@dataclass(frozen=True)
class Reading:
    """Counters at one time (monotonic seconds), and the GPUs' present figures."""

    time: float
    counters: Counters
    gpus: tuple[dict[str, float], ...] = ()


def rates(before: Reading, now: Reading) -> dict[str, float]:
    """Return each counter's growth per second; leaves out counters that were reset."""
    seconds = now.time - before.time
    if seconds <= 0:
        return {}
    return {
        name: (value - before.counters[name]) / seconds
        for name, value in now.counters.items()
        if value >= before.counters.get(name, value + 1)
    }


def event_fields(before: Reading, now: Reading) -> dict[str, Any]:
    """Return a ``node`` event's fields: rates, errors since ``before``, and the GPUs' extremes.

    Unknown figures are None; ``gpus`` lists every GPU.
    """
    per_second = rates(before, now)
    seconds = now.time - before.time

    def growth(name: str) -> int | None:
        return round(per_second[name] * seconds) if name in per_second else None

    return {
        "network_receive_bytes_per_second": per_second.get("network_receive"),
        "network_send_bytes_per_second": per_second.get("network_send"),
        "efa_receive_bytes_per_second": per_second.get("efa_rx_bytes"),
        "efa_send_bytes_per_second": per_second.get("efa_tx_bytes"),
        "efa_drops": growth("efa_rx_drops"),
        "efa_retransmits": growth("efa_retrans_pkts"),
        "disk_read_bytes_per_second": per_second.get("disk_read"),
        "disk_write_bytes_per_second": per_second.get("disk_write"),
        "read_bytes_per_second": per_second.get("files_read"),
        "nvlink_bytes_per_second": per_second.get("nvlink"),
        "gpu_utilization_mean": _over_gpus(now, "utilization", mean),
        "gpu_utilization_min": _over_gpus(now, "utilization", min),
        "gpu_memory_used_max": _over_gpus(now, "memory_used", max),
        "gpu_temperature_max": _over_gpus(now, "temperature", max),
        "gpu_clock_min": _over_gpus(now, "sm_clock", min),
        "gpu_power_mean": _over_gpus(now, "power", mean),
        "gpu_ecc_uncorrected": _over_gpus(now, "ecc_uncorrected", sum),
        "gpus": [dict(gpu) for gpu in now.gpus],
    }


def _over_gpus(
    reading: Reading, name: str, aggregate: Callable[[Sequence[float]], float]
) -> float | None:
    values = [gpu[name] for gpu in reading.gpus if name in gpu]
    return aggregate(values) if values else None


@dataclass
class NodeCounters:
    """Reads this node's counters; ``root`` is where ``/proc`` and ``/sys`` are found."""

    root: Path = Path("/")
    nvml: Any = None
    _handles: list[Any] = field(default_factory=list)

    @classmethod
    def open(cls) -> NodeCounters:
        """Open this node's counters, with its GPUs if NVIDIA's library and driver are installed."""
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            return cls(nvml=pynvml, _handles=handles)
        return cls()

    def read(self, now: float, pids: Sequence[int]) -> Reading:
        """Read all counters; ``pids`` are the training processes, whose file reads are counted."""
        counters = self._network() | self._efa() | self._disks()
        processes = [descendant for pid in pids for descendant in (pid, *procfs.descendants(pid))]
        counters["files_read"] = sum(procfs.read_bytes(pid) for pid in processes)
        gpus = tuple(self._gpu(index, handle) for index, handle in enumerate(self._handles))
        if gpus and (link := sum(self._nvlink(handle) for handle in self._handles)):
            counters["nvlink"] = link
        return Reading(now, counters, gpus)

    def _network(self) -> Counters:
        """Sum the bytes of all interfaces but loopback."""
        receive = send = 0
        for line in _lines(self.root / "proc/net/dev"):
            name, _, rest = line.partition(":")
            columns = rest.split()  # 8 of receiving, 8 of sending; bytes come first
            if len(columns) >= 16 and name.strip() != "lo":
                receive, send = receive + int(columns[0]), send + int(columns[8])
        return {"network_receive": receive, "network_send": send}

    def _efa(self) -> Counters:
        """Sum the EFA driver's hardware counters over devices and ports."""
        counters: Counters = {}
        for path in self.root.glob("sys/class/infiniband/*/ports/*/hw_counters/*"):
            with contextlib.suppress(OSError, ValueError):
                name = f"efa_{path.name}"
                counters[name] = counters.get(name, 0) + int(path.read_text())
        return counters

    def _disks(self) -> Counters:
        """Sum the bytes of whole block devices; a sector of diskstats is always 512 bytes."""
        devices = {path.name for path in (self.root / "sys/block").glob("*")}
        read = written = 0
        for line in _lines(self.root / "proc/diskstats"):
            columns = line.split()  # 2: device, 5: sectors read, 9: sectors written
            if len(columns) < 10 or columns[2].startswith(("loop", "ram")):
                continue
            if columns[2] in devices:
                read, written = read + 512 * int(columns[5]), written + 512 * int(columns[9])
        return {"disk_read": read, "disk_write": written}

    def _gpu(self, index: int, handle: Any) -> dict[str, float]:
        """Return one GPU's figures: %, bytes, °C, MHz, W, and counts since the driver loaded."""
        nvml = self.nvml
        queries: dict[str, Callable[[], float]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_used": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "ecc_corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        figures: dict[str, float] = {"gpu": index}
        for name, query in queries.items():
            with contextlib.suppress(nvml.NVMLError):
                figures[name] = query()
        return figures

    def _nvlink(self, handle: Any) -> int:
        """Return the bytes over all links, in both directions."""
        nvml, total = self.nvml, 0
        for name in (
            "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
            "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
        ):
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                # A scope of all ones is the sum over all links; the value is in KiB (nvml.h, R535).
                [value] = nvml.nvmlDeviceGetFieldValues(handle, [(getattr(nvml, name), 0xFFFFFFFF)])
                if value.nvmlReturn == nvml.NVML_SUCCESS:
                    total += 1024 * int(value.value.ullVal)
        return total


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
