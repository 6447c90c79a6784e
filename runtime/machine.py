"""How much memory this process may have, from the operating system."""

from pathlib import Path

import mlx.core as mx
import psutil

__all__ = ["available_memory", "cgroup_limit", "resident_memory"]

CGROUP_FILES = (
    "/sys/fs/cgroup/memory.max",  # version 2
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",  # version 1
)
HEADROOM = 0.9  # leave a tenth to everyone else


def available_memory() -> int:
    """Bytes this process may take in all: free RAM plus its own, cgroup and Metal limits kept."""
    limits = [psutil.virtual_memory().available + resident_memory()]
    if (limit := cgroup_limit()) is not None:
        limits.append(limit)
    working_set = mx.device_info().get("max_recommended_working_set_size")
    if isinstance(working_set, int) and working_set > 0:
        limits.append(working_set)
    return int(min(limits) * HEADROOM)


def cgroup_limit(files: tuple[str, ...] = CGROUP_FILES) -> int | None:
    """The memory limit of the control group this process is in; None when there is none."""
    for file in files:
        path = Path(file)
        if path.is_file():
            text = path.read_text().strip()
            if text.isdigit() and int(text) < 2**60:  # version 1 says 2^63 less a page for none
                return int(text)
    return None


def resident_memory() -> int:
    """Bytes of RAM this process has now."""
    return int(psutil.Process().memory_info().rss)
