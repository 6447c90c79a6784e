"""How much memory this process may have, from the operating system."""

import ctypes
import gc
from pathlib import Path

import mlx.core as mx
import psutil

from moepack.formats.errors import SourceError
from moepack.formats.sizes import format_size

__all__ = [
    "available_memory",
    "cgroup_limit",
    "most_wired",
    "problem_of_group",
    "release_memory",
    "resident_memory",
    "wire_memory",
]

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
HEADROOM = 0.9  # leave a tenth to everyone else


def available_memory() -> int:
    """Bytes this process may take in all: free RAM plus its own, cgroup and Metal limits kept."""
    limits = [psutil.virtual_memory().available + resident_memory()]
    if (limit := cgroup_limit()) is not None:
        limits.append(limit)
    if (working_set := metal_working_set()) is not None:
        limits.append(working_set)
    return int(min(limits) * HEADROOM)


def cgroup_limit(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int | None:
    """The least memory limit of this process's control groups, versions 1 and 2; None without.

    A group is bounded by those above it. In a container its path may not be visible: then what is
    at the root is the container's own.
    """
    if not own.is_file():
        return None
    limits = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                if text.isdigit() and int(text) < 2**60:  # version 1 says 2^63 less a page for none
                    limits.append(int(text))
    return min(limits, default=None)


def problem_of_group(nbytes: int) -> str | None:
    """Why this process would be killed if it took `nbytes`; None where nothing says so."""
    limit = cgroup_limit()
    if limit is None or nbytes <= limit:
        return None
    return (
        f"{format_size(nbytes)} are planned, but the control group of this process allows "
        f"{format_size(limit)}"
    )


def resident_memory() -> int:
    """Bytes of RAM this process has now."""
    return int(psutil.Process().memory_info().rss)


def most_wired() -> int:
    """How many bytes Metal may be asked to keep in RAM, so that others find some.

    Raises SourceError where there is no Metal.
    """
    working_set = metal_working_set()
    if working_set is None:
        raise SourceError("--wire: only Metal wires memory, and this machine has none")
    return int(working_set * HEADROOM)


def wire_memory(nbytes: int) -> int:
    """Have Metal keep up to `nbytes` of MLX's memory in RAM from now on; returns what it will keep.

    mlx-lm raises the limit while it generates and then restores this one. Written from the
    documentation of macOS 15's wired limit; not run by its authors. Raises as `most_wired`.
    """
    limit = min(nbytes, most_wired())
    mx.set_wired_limit(limit)
    return limit


def metal_working_set() -> int | None:
    """Bytes that Metal recommends to stay within; None without Metal."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return size if isinstance(size, int) and size > 0 else None


def release_memory() -> None:
    """Give the system back what nothing refers to any more, a dropped model's weights above all.

    glibc keeps what was freed for itself: of a model of 1.2 GB, 160 MB stayed.
    """
    gc.collect()
    mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have no such thing
    if trim is not None:
        trim(0)
