"""Describe what a run ran on: code, packages, hardware, threads; no environment variables, user or host names."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hiddenlab

PACKAGES = (
    "hiddenlab", "torch", "transformers", "tokenizers", "accelerate", "bitsandbytes", "safetensors", "numpy",
    "rouge-score", "sacrebleu",
)  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """Return the fields command, code, packages, hardware and threads of a RunRecord; None where unknown."""
    torch = sys.modules.get("torch")
    return {
        "command": ["hiddenlab", *sys.argv[1:]],
        "code": {"version": hiddenlab.__version__, **_git()},
        "packages": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "hardware": _hardware(torch),
        "threads": torch.get_num_threads() if torch else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Return commit and dirty flag of the checkout that this code runs from; None when it is installed."""
    here = Path(hiddenlab.__file__).resolve().parent
    top = _output("git", "-C", str(here), "rev-parse", "--show-toplevel")
    # In an environment within another repository, git would name that repository's commit.
    if top is None or Path(top).resolve() != here.parent:
        return {"commit": None, "dirty": None}
    status = _output("git", "-C", top, "status", "--porcelain")
    return {
        "commit": _output("git", "-C", top, "rev-parse", "--verify", "--quiet", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _hardware(torch: Any) -> dict[str, Any]:
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mb": _memory_mb(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _memory_mb() -> float | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (AttributeError, OSError, ValueError):
        return None


def peak_memory_mb() -> float:
    """Return the most memory this process ever held, in MB (10⁶ bytes)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
