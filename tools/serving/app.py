"""The routes of the server, as an ASGI application."""

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from moepack.tools.serving.answers import ClientGone, Service, answer
from moepack.tools.serving.bodies import ChatBody, CompletionBody
from moepack.tools.serving.errors import ApiError
from moepack.tools.serving.guards import counted, cut_off, guarded, hosted
from moepack.tools.serving.live import LiveResponse
from moepack.tools.serving.metrics import Metrics
from moepack.tools.serving.pages import PAGE_HEADERS, page_files
from moepack.tools.serving.usage import Watch

__all__ = ["make_app"]


def make_app(
    service: Service, watch: Watch, key: str | None, hosts: Collection[str] | None
) -> ASGIApp:
    """The application. `hosts`: the only names it may be asked by; None for any."""
    worker, catalog = service.worker, service.catalog
    metrics = Metrics(worker)
    files = page_files()
    settings = {"needs_key": key is not None}

    async def health(request: Request) -> Response:
        try:
            worker.check_ready()
        except ApiError as error:
            return JSONResponse({"status": error.code}, 503)
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        listed = [catalog.as_map(name) for name in catalog.names]
        return JSONResponse({"object": "list", "data": listed})

    async def model(request: Request) -> Response:
        return JSONResponse(catalog.as_map(catalog.chosen(request.path_params["name"])))

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def chat(request: Request) -> Response:
        return await answer(service, request, ChatBody)

    async def complete(request: Request) -> Response:
        return await answer(service, request, CompletionBody)

    async def live(request: Request) -> Response:
        return LiveResponse(worker, watch)

    async def page(request: Request) -> Response:
        content, kind = files[request.url.path]
        return Response(content, media_type=kind, headers=PAGE_HEADERS)

    async def page_settings(request: Request) -> Response:
        return JSONResponse(settings, headers=PAGE_HEADERS)

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", show_metrics),
        Route("/events", live),
        Route("/settings", page_settings),
        *(Route(path, page) for path in files),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _show_api_error,
        HTTPException: _show_http_error,
        ClientDisconnect: _show_nothing,
        ClientGone: _show_nothing,
        Exception: _show_failure,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    paths = {route.path.removesuffix("/{name:path}") for route in routes}
    open_paths = {"/health", "/settings", *files}
    return cut_off(counted(hosted(guarded(app, key, open_paths), hosts), metrics, paths))


async def _show_api_error(request: Request, error: ApiError) -> Response:
    headers = {413: {"connection": "close"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}
    return JSONResponse(error.as_map(), error.status, headers.get(error.status))


async def _show_http_error(request: Request, error: HTTPException) -> Response:
    """Of the router: no such path, or not with this method."""
    text = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, text).as_map(), error.status_code)


async def _show_nothing(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


async def _show_failure(request: Request, error: Exception) -> Response:
    text = f"unexpected {type(error).__name__}; the server's log says where"
    return JSONResponse(ApiError(500, text).as_map(), 500)
