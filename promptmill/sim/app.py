"""The HTTP application: routes, keys, and the details by which clients know uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from promptmill.sim import generate, info, openai
from promptmill.sim.hub import Hub
from promptmill.sim.refusals import Refusal

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_UNLOGGED = ("/health", "/metrics")
_ADMIN = ("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation")
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


def make_app(hub: Hub, startup_s: float) -> web.Application:
    app = web.Application(middlewares=[_middleware(hub)], client_max_size=1 << 30)
    app.on_response_prepare.append(_like_uvicorn(hub))
    control = _Control(hub, startup_s)
    routes: list[tuple[str, str, _Handler]] = [
        ("GET", "/health", control.health),
        ("GET", "/health_generate", control.health),
        ("GET", "/ping", control.ping),
        ("GET", "/model_info", control.model_info),
        ("GET", "/get_model_info", control.model_info),
        ("GET", "/server_info", control.server_info),
        ("GET", "/get_server_info", control.server_info),
        ("GET", "/v1/models", control.models),
        ("GET", "/v1/loads", control.loads),
        ("*", "/flush_cache", control.flush),
        ("POST", "/abort_request", control.abort),
        ("POST", "/pause_generation", control.pause),
        ("POST", "/continue_generation", control.accept),
        ("POST", "/freeze_gc", control.accept),
    ]
    bodies = {
        "/generate": generate.generate,
        "/v1/completions": openai.completions,
        "/v1/chat/completions": openai.chat,
        "/tokenize": openai.tokenize,
        "/v1/tokenize": openai.tokenize,
        "/detokenize": openai.detokenize,
    }
    for path, handler in bodies.items():
        routes += [("POST", path, _bound(hub, handler))]
    routes.append(("PUT", "/generate", _bound(hub, generate.generate)))
    routes.append(("GET", "/get_load", control.get_load) if hub.log.old else ("GET", "/ready", control.ready))
    if hub.args["enable_metrics"]:
        routes.append(("GET", "/metrics", control.metrics))
    for method, path, handle in routes:
        app.router.add_route(method, path, handle)
    return app


class _Control:
    """Everything but generation."""

    def __init__(self, hub: Hub, startup_s: float) -> None:
        self.hub, self.startup_s = hub, startup_s

    async def health(self, _request: web.Request) -> web.StreamResponse:
        if self.hub.exiting:
            self.hub.log.info("Health check request received during shutdown. Returning 503.")
            return web.Response(status=503)
        if self.hub.status == "Starting":
            return web.Response(status=503)
        return web.Response(status=200 if await self.hub.is_healthy() else 503)

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        up = self.hub.status == "Up" and not self.hub.exiting
        return web.Response(status=200 if up else 503)

    async def ping(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.hub.exiting or self.hub.status == "Starting" else 200)

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        self._deprecated(request, "/model_info")
        return generate.json_answer(info.model_info(self.hub))

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        self._deprecated(request, "/server_info")
        state = await self.hub.ask("state")
        return generate.json_answer(info.server_info(self.hub, state, self.startup_s))

    async def models(self, _request: web.Request) -> web.StreamResponse:
        return generate.json_answer(info.models(self.hub))

    async def loads(self, _request: web.Request) -> web.StreamResponse:
        return generate.json_answer(info.loads(self.hub))

    async def get_load(self, _request: web.Request) -> web.StreamResponse:
        return generate.json_answer(info.get_load(self.hub))

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        text = info.metrics(self.hub).encode()
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=text, headers={"Content-Type": kind})

    async def flush(self, _request: web.Request) -> web.StreamResponse:
        flushed = (await self.hub.ask("flush"))["ok"]
        text = _FLUSHED if flushed else "Flush cache failed.\n"
        return _bare(text.encode(), 200 if flushed else 400)

    async def abort(self, request: web.Request) -> web.StreamResponse:
        body = await generate.read_json(request, "abort_request", 1400)
        self.hub.abort(body.get("rid") or "", bool(body.get("abort_all")) or not body.get("rid"))
        return web.Response(status=200)

    async def pause(self, request: web.Request) -> web.StreamResponse:
        body = await generate.read_json(request, "pause_generation", 1420)
        if body.get("mode", "abort") == "abort":
            self.hub.abort(everything=True)
        return generate.json_answer({"status": "ok"})

    async def accept(self, _request: web.Request) -> web.StreamResponse:
        return generate.json_answer({"status": "ok"})

    def _deprecated(self, request: web.Request, new: str) -> None:
        if request.path != new:
            self.hub.log.error(
                f"Endpoint '{request.path}' is deprecated and will be removed in a future version. "
                f"Please use '{new}' instead."
            )


def _bare(body: bytes, status: int) -> web.Response:
    """A body without a content type, as the real one sends it."""
    response = web.Response(body=body, status=status)
    response.headers.pop("Content-Type", None)
    return response


def _bound(hub: Hub, handler: Callable[[Hub, web.Request], Awaitable[web.StreamResponse]]) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(hub, request)

    return handle


def _middleware(hub: Hub) -> Any:
    key, admin_key = hub.args["api_key"], hub.args["admin_api_key"]
    transports: set[asyncio.Transport] = set()

    def denial(request: web.Request) -> web.Response | None:
        if request.path.startswith(("/health", "/metrics")):
            return None
        given = request.headers.get("Authorization")
        if admin_key and request.path in _ADMIN:
            if given == f"Bearer {admin_key}":
                return None
            return generate.json_answer({"error": "Unauthorized"}, 401 if not given else 403)
        if key and given != f"Bearer {key}":
            return generate.json_answer({"error": "Unauthorized"}, 401)
        return None

    def cut() -> None:
        hub.cut.clear()
        for transport in transports:
            transport.abort()

    async def cut_if_told(transport: asyncio.Transport | None, work: asyncio.Future[Any]) -> None:
        """Wait for the answer, or for the fault that cuts all connections."""
        if transport is not None:
            transports.add(transport)
        told = asyncio.ensure_future(hub.cut.wait())
        try:
            await asyncio.wait([work, told], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                cut()
        finally:
            told.cancel()
            if transport is not None:
                transports.discard(transport)

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if (denied := denial(request)) is not None:
            return denied
        work = asyncio.ensure_future(handler(request))
        try:
            await cut_if_told(request.transport, work)
            return await work
        except Refusal as refusal:
            if refusal.status == 500 and not refusal.body:
                return web.Response(text="Internal Server Error", status=500)
            if refusal.message:
                hub.log.error(f"[http_server] Error: {refusal.message}")
            return generate.json_answer(refusal.body, refusal.status)
        except web.HTTPException as error:
            return generate.json_answer({"detail": error.reason}, error.status)
        finally:
            work.cancel()

    return middleware


def _like_uvicorn(hub: Hub) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "uvicorn"
        response.headers["Vary"] = "Origin"
        if isinstance(response, web.Response) and not response.body:
            response.headers.pop("Content-Type", None)
        elif response.headers.get("Content-Type") == "application/octet-stream":
            del response.headers["Content-Type"]
        if not request.path.startswith(_UNLOGGED):
            peer = request.transport.get_extra_info("peername") if request.transport else None
            client = f"{peer[0]}:{peer[1]}" if peer else "127.0.0.1:0"
            hub.log.access(client, request.method, request.path_qs, response.status, response.reason or "")

    return prepare
