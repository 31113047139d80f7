"""The header of every record: what it was measured on."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def describe(device: torch.device, commit: str = "") -> dict[str, str]:
    """Device, driver, versions and commit, as text."""
    header = {"device": device_name(device)}
    if device.type == "cuda":
        header["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).split("\n")[0]
        header["cuda"] = str(torch.version.cuda)
    else:
        header["threads"] = str(torch.get_num_threads())
    header |= {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "transformers", "liger_kernel"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            header[package] = metadata.version(package.replace("_", "-"))
    header["commit"] = commit or current_commit()
    header["date"] = date.today().isoformat()
    return header


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo")
    text = known.read_text() if known.exists() else ""
    model = next(iter(re.findall(r"(?m)^model name\s*:\s*(.*?)\s*$", text)), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def current_commit() -> str:
    """Short hash, with a plus when files differ from it; "unknown" outside of a clone."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD")
    tracked = ("torch_streamkl", "fx_passes", "bench/*.py")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *tracked)
    return commit + ("+" if changed else "") if commit else "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
