"""What a machine's network, disks and GPUs do, which CloudWatch does not show for training jobs.

Counters of the kernel and of the GPUs' driver, read at a low rate; a rate is the difference of two
readings. What is not there (no EFA, no GPU, an old driver) is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common import procfs

Counters = dict[str, int]


@dataclass(frozen=True)
class Reading:
    """Counters at one time (monotonic seconds), and the GPUs' momentary figures."""

    time: float
    counters: Counters
    gpus: tuple[dict[str, float], ...] = ()


def rates(before: Reading, now: Reading) -> dict[str, float]:
    """Each counter's growth a second; one that was set back (a new process) is left out."""
    seconds = now.time - before.time
    if seconds <= 0:
        return {}
    return {
        name: (value - before.counters[name]) / seconds
        for name, value in now.counters.items()
        if value >= before.counters.get(name, value + 1)
    }


def event_fields(before: Reading, now: Reading) -> dict[str, Any]:
    """A ``node`` event's fields: rates, errors since the last event, and the GPUs' extremes.

    Unknown is None; ``gpus`` lists every GPU.
    """
    found = rates(before, now)
    seconds = now.time - before.time

    def grown(name: str) -> int | None:
        return round(found[name] * seconds) if name in found else None

    return {
        "network_receive_bytes_per_second": found.get("network_receive"),
        "network_send_bytes_per_second": found.get("network_send"),
        "efa_receive_bytes_per_second": found.get("efa_rx_bytes"),
        "efa_send_bytes_per_second": found.get("efa_tx_bytes"),
        "efa_drops": grown("efa_rx_drops"),
        "efa_retransmits": grown("efa_retrans_pkts"),
        "disk_read_bytes_per_second": found.get("disk_read"),
        "disk_write_bytes_per_second": found.get("disk_write"),
        "read_bytes_per_second": found.get("files_read"),
        "nvlink_bytes_per_second": found.get("nvlink"),
        "gpu_utilization_mean": _over(now, "utilization", lambda all_: sum(all_) / len(all_)),
        "gpu_utilization_min": _over(now, "utilization", min),
        "gpu_memory_used_max": _over(now, "memory_used", max),
        "gpu_temperature_max": _over(now, "temperature", max),
        "gpu_clock_min": _over(now, "sm_clock", min),
        "gpu_power_mean": _over(now, "power", lambda all_: sum(all_) / len(all_)),
        "gpu_ecc_uncorrected": _over(now, "ecc_uncorrected", sum),
        "gpus": [dict(gpu) for gpu in now.gpus],
    }


def _over(reading: Reading, name: str, of: Callable[[Sequence[float]], float]) -> float | None:
    values = [gpu[name] for gpu in reading.gpus if name in gpu]
    return of(values) if values else None


@dataclass
class NodeCounters:
    """Reads this machine; ``root`` is where ``/proc`` and ``/sys`` are found."""

    root: Path = Path("/")
    nvml: Any = None
    _handles: list[Any] = field(default_factory=list)

    @classmethod
    def here(cls) -> NodeCounters:
        """With its GPUs, where NVIDIA's library and driver are there."""
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            return cls(nvml=pynvml, _handles=handles)
        return cls()

    def read(self, now: float, pids: Sequence[int]) -> Reading:
        """``pids`` are the training processes: what they and their workers read from files."""
        counters = self._network() | self._efa() | self._disks()
        family = [one for pid in pids for one in (pid, *procfs.descendants(pid))]
        counters["files_read"] = sum(procfs.read_bytes(pid) for pid in family)
        gpus = tuple(self._gpu(index, handle) for index, handle in enumerate(self._handles))
        if gpus and (link := sum(self._nvlink(handle) for handle in self._handles)):
            counters["nvlink"] = link
        return Reading(now, counters, gpus)

    def _network(self) -> Counters:
        """All interfaces but loopback."""
        receive = send = 0
        for line in _lines(self.root / "proc/net/dev"):
            name, _, rest = line.partition(":")
            numbers = rest.split()
            if len(numbers) >= 16 and name.strip() != "lo":
                receive, send = receive + int(numbers[0]), send + int(numbers[8])
        return {"network_receive": receive, "network_send": send}

    def _efa(self) -> Counters:
        """The EFA driver's hardware counters, summed over devices and ports."""
        found: Counters = {}
        for path in self.root.glob("sys/class/infiniband/*/ports/*/hw_counters/*"):
            with contextlib.suppress(OSError, ValueError):
                name = f"efa_{path.name}"
                found[name] = found.get(name, 0) + int(path.read_text())
        return found

    def _disks(self) -> Counters:
        """Whole block devices; a sector is 512 bytes there whatever the device's own."""
        whole = {path.name for path in (self.root / "sys/block").glob("*")}
        read = written = 0
        for line in _lines(self.root / "proc/diskstats"):
            parts = line.split()
            if len(parts) >= 10 and parts[2] in whole and not parts[2].startswith(("loop", "ram")):
                read, written = read + 512 * int(parts[5]), written + 512 * int(parts[9])
        return {"disk_read": read, "disk_write": written}

    def _gpu(self, index: int, handle: Any) -> dict[str, float]:
        """Shares of 100, bytes, °C, MHz, W and counts since the driver was loaded."""
        nvml = self.nvml
        ask: dict[str, Callable[[], float]] = {
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
        found: dict[str, float] = {"gpu": index}
        for name, one in ask.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = one()
        return found

    def _nvlink(self, handle: Any) -> int:
        """Bytes over all links, both ways."""
        nvml, total = self.nvml, 0
        for name in (
            "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
            "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
        ):
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                # Scope all ones: the sum over all links, in KiB (nvml.h, R535).
                [value] = nvml.nvmlDeviceGetFieldValues(handle, [(getattr(nvml, name), 0xFFFFFFFF)])
                if value.nvmlReturn == nvml.NVML_SUCCESS:
                    total += 1024 * int(value.value.ullVal)
        return total


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
