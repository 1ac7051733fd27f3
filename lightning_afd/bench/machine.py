"""What a run was made on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch


def machine(ranks: int) -> dict[str, Any]:
    """Processor, cores, GPU, ranks, load and versions."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(names),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "ranks": ranks,
        "load": " ".join(" ".join(_lines("/proc/loadavg")).split()[:3]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def busy_seconds() -> float:
    """CPU seconds that processes on all cores of this machine have worked since its start; 0 where nothing says so.

    Interrupts count, as they do for the process that they interrupt.
    """
    for line in _lines("/proc/stat")[:1]:
        user, nice, system, _, _, interrupts, soft, *_ = (int(ticks) for ticks in line.split()[1:])
        return (user + nice + system + interrupts + soft) / 100
    return 0.0


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
