"""What a figure was measured on, kept beside it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def describe(device: torch.device | None = None) -> dict[str, Any]:
    """Hardware, versions, commit, date, and how busy the machine is right now. `device` is what was used."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _commit() -> str:
    """The checkout's commit, marked if files have changed since."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
