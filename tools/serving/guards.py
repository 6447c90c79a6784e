"""What stands before the routes: hosts, the API key, and the counting of what is answered."""

import asyncio
import hmac
from collections.abc import Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepack.tools.serving.errors import ApiError
from moepack.tools.serving.metrics import Metrics

__all__ = ["counted", "cut_off", "guarded", "hosted"]


def hosted(app: ASGIApp, hosts: Collection[str] | None) -> ASGIApp:
    """Only requests to these host names are answered: a page of another site, whose name was made
    to lead here (DNS rebinding), gets nothing. None for any host."""
    if hosts is None:
        return app

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            stated = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            # Names are of any case, and may end with the dot of the root of all domains.
            if _without_port(stated).lower().removesuffix(".") not in hosts:
                error = ApiError(403, f"host {stated!r} is not this server", code="wrong_host")
                await JSONResponse(error.as_map(), 403)(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def _without_port(host: str) -> str:
    """Of `name:port` the name; of `[::1]:port` that in brackets, with them."""
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


def guarded(app: ASGIApp, key: str | None, open_paths: Collection[str]) -> ASGIApp:
    """With a key, all but `open_paths` needs it: `Authorization: Bearer KEY`."""
    if key is None:
        return app
    wanted = key.encode()

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in open_paths:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, credentials = given.partition(b" ")
            is_right = hmac.compare_digest(credentials.strip(b" "), wanted)
            if not is_right or scheme.lower() != b"bearer":
                error = ApiError(401, "a wrong API key, or none", code="invalid_api_key")
                response = JSONResponse(error.as_map(), 401, {"www-authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def counted(app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> ASGIApp:
    """Count what is answered, by path and status; paths that are not there are one."""

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        path = scope["path"]
        known = next((p for p in sorted(paths, key=len)[::-1] if _begins(path, p)), "other")

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.requests.labels(known, str(message["status"])).inc()
            await send(message)

        await app(scope, receive, send_counted)

    return counting


def _begins(path: str, known: str) -> bool:
    return path == known or (known == "/v1/models" and path.startswith("/v1/models/"))


def cut_off(app: ASGIApp) -> ASGIApp:
    """What is still being sent when the server has to end is cut off: no failure to be logged."""

    async def ended(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:  # by uvicorn, whose patience with a slow reader is over
            return

    return ended
