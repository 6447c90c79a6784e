"""The first and last moments of the command: signals while libraries load, and what they need.

Knows nothing of moepack, so that it is there before anything else is.
"""

import os
import resource
import signal
import sys
from types import FrameType

__all__ = ["entry_point", "interrupts_unwind", "open_files_problem", "terminations_unwind"]

# mlx_lm.utils sets this hard limit of open files when it is imported.
MLX_LM_OPEN_FILES = 4096


def entry_point() -> None:
    """What the installed script calls."""
    signal.signal(signal.SIGINT, _leave_at_once)
    if sys.argv[1:2] == ["serve"]:  # which SIGTERM ends with exit code 0, from the first moment
        signal.signal(signal.SIGTERM, _end_at_once)
    # Of long prompts transformers warns by what a tokenizer, not by what the model can take.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from moepack.tools.cli import main

    sys.exit(main())


def interrupts_unwind() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: work has begun that needs an orderly end.

    Before, while libraries are imported, there is nothing to undo, and they are known to swallow
    the exception or to turn it into an ImportError.
    """
    if signal.getsignal(signal.SIGINT) is _leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def terminations_unwind() -> None:
    """From here on SIGTERM ends the command in order: a temporary folder is to be removed."""
    signal.signal(signal.SIGTERM, _leave_in_order)


def _leave_in_order(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def _end_at_once(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped\n")
    os._exit(0)


def _leave_at_once(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"moepack: interrupted\n")
    os._exit(130)


def open_files_problem(hard_limit: int | None = None) -> str | None:
    """Why mlx-lm cannot be imported under the hard limit of open files; None when it can."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard_limit is None else hard_limit
    if hard == resource.RLIM_INFINITY or hard >= MLX_LM_OPEN_FILES or os.geteuid() == 0:
        return None
    return (
        f"this process may open {hard} files at most, and mlx-lm wants {MLX_LM_OPEN_FILES}; "
        f"raise the hard limit (ulimit -Hn {MLX_LM_OPEN_FILES})"
    )
