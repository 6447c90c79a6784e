"""Work in a process of its own: its memory is its own, and gone with it."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from moepack.formats.errors import SourceError

__all__ = ["apart"]


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, which starts afresh; or what it raises.

    Whatever ends the wait, that process is over then. Raises SourceError when it ended early.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        is_error, result = receiver.recv()
    except EOFError:
        process.join()
        raise SourceError(
            f"a process of its own for this ended early (status {process.exitcode})"
        ) from None
    finally:
        process.terminate()
        process.join()
        receiver.close()
    if is_error:
        raise result
    return result


def _work(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """What that process does. An interrupt ends it without a word; its parent speaks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process would leak
    try:
        answer: tuple[bool, Any] = (False, function(*arguments))
    except Exception as error:
        answer = (True, error)
    sender.send(answer)
