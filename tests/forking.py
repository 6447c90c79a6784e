"""Calls in forks of one process that has imported everything: what is measured is the call's."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Fork", "forking"]

# Gives exit status (negative: the signal) and what was written to stdout and stderr, together.
Fork = Callable[[Any], tuple[int, str]]
MAX_CALL_S = 120
LOOP = f"""
import gc, json, os, signal, sys

gc.freeze()  # no fork goes through what they share
for line in sys.stdin:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        status = 99
        try:
            signal.alarm({MAX_CALL_S})
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            status = run(json.loads(line))
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    with open(reader, errors="replace") as pipe:
        output = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, output]), flush=True)
"""


@contextmanager
def forking(preparation: str) -> Iterator[Fork]:
    """`preparation` is Python that defines `run(job)`, which returns an exit status.

    A job is what JSON can hold.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", preparation + LOOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, replies = process.stdin, process.stdout

    def fork(job: Any) -> tuple[int, str]:
        requests.write(json.dumps(job) + "\n")
        requests.flush()
        status, output = json.loads(replies.readline())
        return status, output

    yield fork
    requests.close()
    replies.close()
    assert process.wait() == 0
