"""The server's HTTP side as one ASGI application, over any engine that has the EngineApi."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline import __version__
from paceline.launcher.serving.chat import chat_routes
from paceline.launcher.serving.completions import completion_routes
from paceline.launcher.serving.delivery import BODY_SEND
from paceline.launcher.serving.description import describe
from paceline.launcher.serving.door import Door
from paceline.launcher.serving.engine_api import EngineApi
from paceline.launcher.serving.errors import to_api_error
from paceline.launcher.serving.gate import Gate
from paceline.launcher.serving.general import model_routes, token_routes, watch_routes
from paceline.launcher.serving.page_files import page_routes
from paceline.launcher.serving.record import record_of
from paceline.launcher.serving.responses import response_routes
from paceline.launcher.serving.settings import ServerSettings
from paceline.launcher.serving.watching import engine_routes
from paceline.launcher.tokenizer import Tokenizer


def create_app(engine: EngineApi, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """The application.

    Its state.admission refuses new requests with 503 once closed, and counts those accepted; its state.grammars may be
    prepared.
    """
    door = Door(engine, tokenizer, settings)
    tracing = None
    if settings.otlp_endpoint is not None:
        from paceline.launcher.serving.tracing import Tracing

        tracing = Tracing(settings.otlp_endpoint, door.model_name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if tracing is not None:
            tracing.close()

    # FastAPI's pages of documentation load scripts from other hosts, so only the description itself is served.
    app = _Application(
        title="paceline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.admission = door.admission
    app.state.grammars = door.grammars
    for routes in (
        chat_routes,
        completion_routes,
        response_routes,
        model_routes,
        token_routes,
        watch_routes,
        engine_routes,
    ):
        # Not by include_router, which would look for each request's route twice.
        app.router.routes.extend(routes(door).routes)
    describe(app, settings)
    page = page_routes()
    app.router.routes.extend(page)
    page_paths = frozenset(route.path for route in page)
    # All other exceptions reach the gate by themselves.
    app.add_exception_handler(HTTPException, _answer_error)
    paths = frozenset([*app.openapi()["paths"], "/openapi.json"])
    app.add_middleware(
        Gate, settings=settings, metrics=door.metrics, tracing=tracing, paths=paths, page_paths=page_paths
    )
    if settings.cors_origins:
        # The last one added is the outermost: a page may read a refusal too, and a preflight needs no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return app


class _Application(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The way in: before all layers, the first of which cannot be chosen.

        Then Starlette's own, since FastAPI's looks for an OpenTelemetry of its own in the environment each time.
        """
        if scope["type"] == "http":
            scope.setdefault("state", {})[BODY_SEND] = send
        await Starlette.__call__(self, scope, receive, send)


async def _answer_error(request: Request, error: Exception) -> Response:
    """FastAPI's own refusals, in the shape that all have here."""
    record = record_of(request)
    record.error = to_api_error(error, record.request_id)
    response = record.error.response()
    if isinstance(error, HTTPException) and error.headers is not None:
        response.headers.update(error.headers)  # a 405 says which methods are allowed
    return response
