"""`moepack serve`: an OpenAI-compatible server and a live page, for one pack or several."""

import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import click

from moepack.formats.errors import SourceError
from moepack.tools.options import (
    Name,
    Size,
    debug_option,
    expert_cache_option,
    memory_option,
    warm_start_option,
    wire_option,
)
from moepack.tools.reporting import note

__all__ = ["command"]

REQUIRED = ("starlette", "uvicorn", "prometheus_client", "pydantic")
HTTP_STOP_S = 2  # for connections to close
STOP_S = 4.0  # for everything


@click.command("serve")
@click.argument("packs", type=Name(), nargs=-1, required=True, metavar="PACK...")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any free."
)
@click.option(
    "--api-key",
    envvar="MOEPACK_API_KEY",
    metavar="KEY",
    help="Clients must send it; better given as MOEPACK_API_KEY, which other users cannot see.",
)
@click.option(
    "--insecure", is_flag=True, help="Listen on other than this machine's addresses without a key."
)
@click.option(
    "--context",
    type=click.IntRange(2),
    default=4096,
    show_default=True,
    help="Tokens of a prompt and its answer that memory is planned for.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Requests that may wait; more are refused.",
)
@click.option(
    "--max-body",
    type=Size(),
    default="8MB",
    show_default=True,
    help="Of a request; four times that of all that are being received or prepared.",
)
@warm_start_option
@wire_option
@memory_option
@expert_cache_option
@debug_option
def command(
    packs: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    insecure: bool,
    context: int,
    max_queue: int,
    max_body: int,
    warm_start: bool,
    wire: bool,
    memory: int | str,
    expert_cache: int | str,
) -> None:
    """Serve packs over HTTP, as OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    Also a live page at /, /health and /metrics. Requests are answered one after the other, in the
    order they came, greedily unless they ask otherwise. SIGTERM and Ctrl-C end the server with
    exit code 0.

    Of several packs, or a folder of them, the field `model` chooses: one at a time is in memory,
    loaded when it is first asked for.
    """
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        raise SourceError(
            f"serve needs {', '.join(missing)}, not installed; pip install 'moepack[serve]'"
        )
    if api_key is not None and not (api_key.isascii() and api_key.strip()):
        raise click.BadParameter("some ASCII characters", param_hint="--api-key")
    listener = _listen(host, port, has_key=api_key is not None, is_insecure=insecure)
    try:
        _serve(
            listener,
            packs,
            key=api_key,
            hosts=_hosts(listener, host) if api_key is None else None,
            context=context,
            max_queue=max_queue,
            max_body=max_body,
            warm_start=warm_start,
            wire=wire,
            memory=memory,
            expert_cache=expert_cache,
        )
    finally:
        listener.close()


def _listen(host: str, port: int, *, has_key: bool, is_insecure: bool) -> socket.socket:
    """A bound socket. Raises SourceError, and UsageError for an address not safe to bind."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise SourceError(f"--host {host}: {error.strerror}") from error
    family, _, _, _, address = found[0]
    is_local = ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback
    if not (is_local or has_key or is_insecure):
        raise click.UsageError(
            f"--host {host} can be reached from other machines; give --api-key, or --insecure"
        )
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        raise SourceError(f"{host}, port {port}: {error.strerror}") from error


def _hosts(listener: socket.socket, given: str) -> set[str] | None:
    """The names this machine's own programs ask by; None where others may ask too."""
    if not ipaddress.ip_address(listener.getsockname()[0].split("%")[0]).is_loopback:
        return None
    return {"localhost", "127.0.0.1", "[::1]", f"[{given}]" if ":" in given else given.lower()}


def _serve(
    listener: socket.socket,
    packs: tuple[str, ...],
    *,
    key: str | None,
    hosts: Collection[str] | None,
    context: int,
    max_queue: int,
    max_body: int,
    warm_start: bool,
    wire: bool,
    memory: int | str,
    expert_cache: int | str,
) -> None:
    """Answer requests until a signal. Raises what loading the only pack raises."""
    import uvicorn

    from moepack.runtime.machine import most_wired
    from moepack.tools.serving.answers import Service
    from moepack.tools.serving.app import make_app
    from moepack.tools.serving.catalog import Catalog, open_packs
    from moepack.tools.serving.loaded import loader
    from moepack.tools.serving.reading import BodyReader
    from moepack.tools.serving.usage import Watch
    from moepack.tools.serving.worker import Worker

    if wire:
        most_wired()
    catalog, watch = Catalog(open_packs(packs), context), Watch()
    if catalog.only is not None:
        catalog.tokenizer(catalog.only)  # a pack without one is refused at once
    told, tell = os.pipe()

    def wake(*_: Any) -> None:
        os.write(tell, b"!")

    load = loader(
        catalog,
        watch,
        memory=memory,
        expert_cache=expert_cache,
        warm_start=warm_start,
        wire=wire,
    )
    worker = Worker(load, catalog.only, max_queue, wake)
    app = make_app(Service(worker, catalog, BodyReader(max_body)), watch, key, hosts)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=HTTP_STOP_S,
        )
    )
    # On a thread of its own, it leaves signals to this one, which does nothing but wait for them.
    http = threading.Thread(target=server.run, args=([listener],), name="moepack-http", daemon=True)
    before = {number: signal.signal(number, wake) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        http.start()
        worker.start()
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        note(f"{', '.join(catalog.names)}: {url}/v1, live page: {url}/")
        os.read(told, 1)
        ends = time.monotonic() + STOP_S
        server.should_exit = True
        worker.close()
        http.join(ends - time.monotonic())
        worker.join(max(0.0, ends - time.monotonic()))
        if worker.failure is not None:
            raise worker.failure
        note("stopped")
        # The profile is saved, the connections are closed. A thread may still be inside a load, a
        # layer or a tokenizer, which nothing can interrupt: Python would wait for it, and C++
        # abort the process when MLX's own threads are destroyed under it. So nothing is destroyed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
