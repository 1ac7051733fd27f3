"""The most memory that something needs beyond what was there before."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """Bytes by which the memory of this process, or of its GPU, grows at most during an action; 0 where nobody knows.

    On a CPU these are pages: what the allocator holds back is given to the system first.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return int(torch.cuda.max_memory_allocated(device) - before)
    if sys.platform != "linux":
        action()
        return 0
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    action()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    """A figure of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
