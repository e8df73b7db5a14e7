"""A server as the clients here meet it: what it serves, and its refusals in words that say what to change."""

from __future__ import annotations

from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.clients.address import KEY_VARIABLE, Address
from paceline.launcher.clients.http import HttpClient, Response, TransportError


def refusal(response: Response, address: Address) -> InputError | EngineError:
    """A refusal as one line."""
    message, _, _ = response.error_fields()
    if response.status == 401:
        return InputError(f"{address} wants an API key ({message}); give it with --api-key or in {KEY_VARIABLE}")
    where = f"{address} answered {response.status}: {message}"
    return EngineError(where) if response.status >= 500 else InputError(where)


def unreachable(error: TransportError, address: Address) -> EngineError:
    """A connection that failed, as one line."""
    return EngineError(f"{address} cannot be reached ({error.kind}); {error.advice}")


async def served_models(client: HttpClient) -> list[dict[str, object]]:
    """What /v1/models lists. Raises InputError or EngineError where the server cannot be asked."""
    try:
        response = await client.get("/v1/models")
    except TransportError as error:
        raise unreachable(error, client.address) from error
    if response.status != 200:
        raise refusal(response, client.address)
    try:
        models = response.json()["data"]
        if not all(isinstance(model["id"], str) for model in models):
            raise ValueError("an id is no text")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{client.address}/v1/models is no list of models; is this an OpenAI-compatible server?"
        ) from error
    return list(models)


async def choose_model(client: HttpClient, name: str | None) -> dict[str, object]:
    """The model of that name as /v1/models describes it, or the first there is.

    Raises InputError where the server does not list it, and as served_models does.
    """
    models = await served_models(client)
    if name is None and models:
        return models[0]
    for model in models:
        if model["id"] == name:
            return model
    names = ", ".join(str(model["id"]) for model in models) or "none at all"
    raise InputError(f"{client.address} serves no model {name or ''!r}; it has {names}")
