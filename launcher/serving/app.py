"""The server's HTTP side as one ASGI application, over any engine that has the EngineApi."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.launcher.serving.chat import chat_routes
from paceline.launcher.serving.completions import completion_routes
from paceline.launcher.serving.description import describe
from paceline.launcher.serving.door import Door
from paceline.launcher.serving.engine_api import EngineApi
from paceline.launcher.serving.errors import to_api_error
from paceline.launcher.serving.gate import Gate
from paceline.launcher.serving.general import model_routes, token_routes, watch_routes
from paceline.launcher.serving.record import record_of
from paceline.launcher.serving.settings import ServerSettings
from paceline.launcher.tokenizer import Tokenizer


def create_app(engine: EngineApi, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """The application. Its state.admission refuses new requests with 503 once closed, and counts those accepted."""
    door = Door(engine, tokenizer, settings)
    # FastAPI's pages of documentation load scripts from other hosts, so only the description itself is served.
    app = FastAPI(title="paceline", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.admission = door.admission
    for routes in (chat_routes, completion_routes, model_routes, token_routes, watch_routes):
        app.include_router(routes(door))
    describe(app, settings)
    # All other exceptions reach the gate by themselves.
    app.add_exception_handler(RequestValidationError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_middleware(Gate, settings=settings, metrics=door.metrics, paths=frozenset(app.openapi()["paths"]))
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


async def _answer_error(request: Request, error: Exception) -> Response:
    """FastAPI's own refusals, in the shape that all have here."""
    record = record_of(request)
    answer = to_api_error(error, record.request_id)
    record.error = answer.message
    response = answer.response()
    if isinstance(error, HTTPException) and error.headers is not None:
        response.headers.update(error.headers)  # a 405 says which methods are allowed
    return response
