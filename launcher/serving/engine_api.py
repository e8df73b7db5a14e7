"""What the HTTP side of the server needs of an engine; nothing here knows where the engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.coordinator.events import CoordinatorStats, RequestEvent
from paceline.coordinator.sampling_params import SamplingParams
from paceline.coordinator.view import EngineView


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is fixed once the engine has started."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    end_ids: tuple[int, ...]
    """Token ids that end an answer, of the checkpoint's configs and its tokenizer."""
    tensor_parallel_size: int
    devices: tuple[str, ...]
    """What each rank runs on."""


class EngineApi(Protocol):
    """An engine as the HTTP side sees it. Used from one event loop."""

    @property
    def info(self) -> EngineInfo | None:
        """None until the engine is ready."""

    @property
    def failure(self) -> str | None:
        """Why the engine is gone, once it is; every running request then raises EngineError."""

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestEvent]:
        """Run one request for one answer (params.n is 1); its events end with the one that has a finish_reason.

        What has come since the last event is one event; its request_id is the engine's own.

        Raises InputError with the first step of the iterator where the request can never run, EngineError where the
        engine is gone. Closing the iterator early aborts the request.
        """

    def abort(self, request_id: str) -> None:
        """End a request; its iterator then ends with finish_reason abort. Unknown ids are left alone."""

    async def stats(self) -> CoordinatorStats:
        """Gauges and counters of now. Raises EngineError where the engine is gone."""

    async def view(self) -> EngineView:
        """What goes on now, for people who watch; its requests bear the ids that `submit` was given. Raises EngineError
        where the engine is gone."""
