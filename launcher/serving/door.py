"""What all routes of a server work with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.requests import Request

from paceline.coordinator.errors import EngineError
from paceline.coordinator.events import CoordinatorStats
from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.dialects.dialect import find_dialect
from paceline.launcher.serving.admission import Admission
from paceline.launcher.serving.answers import Answers, MakeReader
from paceline.launcher.serving.delivery import Delivery, Work
from paceline.launcher.serving.engine_api import EngineApi, EngineInfo
from paceline.launcher.serving.errors import ApiError
from paceline.launcher.serving.exposition import Exposition
from paceline.launcher.serving.metrics import ServerMetrics
from paceline.launcher.serving.prompts import Prompt, PromptReader
from paceline.launcher.serving.record import RequestRecord, record_of
from paceline.launcher.serving.schemas import SamplingBody
from paceline.launcher.serving.settings import ServerSettings
from paceline.launcher.serving.structured import GrammarCheck, grammar_field
from paceline.launcher.serving.token_texts import TokenTexts
from paceline.launcher.serving.tool_use import ToolUse
from paceline.launcher.tokenizer import Tokenizer

STATS_SECONDS = 5.0
"""How long the engine may take to tell its numbers: on a CPU a step may take seconds, and a scrape is given ten."""


class Door:
    """An engine, the tokenizer before it, and what is counted of the requests to it."""

    def __init__(self, engine: EngineApi, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = ServerMetrics()
        self.admission = Admission(settings.max_queue)
        self.exposition = Exposition(self.metrics, self.admission, settings.model_names[0])
        self.prompts = PromptReader(tokenizer)
        self.token_texts = TokenTexts(tokenizer)
        self.dialect = find_dialect(tokenizer, settings.tool_parser, settings.reasoning_parser)
        self.grammars = GrammarCheck(tokenizer)
        self.started = int(time.time())

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.model_names[0]

    def ready_engine(self) -> EngineInfo:
        """What the engine is. Raises ApiError (503) before it is ready and once it is gone."""
        if self.engine.failure is not None:
            raise self._engine_failed()
        if self.engine.info is None:
            raise ApiError(503, "the model is still loading", code="not_ready")
        return self.engine.info

    def _engine_failed(self) -> ApiError:
        return ApiError(503, "the engine has failed; the server's log says why", code="engine_failed")

    async def engine_stats(self) -> CoordinatorStats:
        """The engine's numbers of now.

        Raises ApiError (503) before it is ready, once it is gone, and where it does not answer: a step that does not
        end, as of ranks that wait for each other, keeps it from that.
        """
        self.ready_engine()
        try:
            async with asyncio.timeout(STATS_SECONDS):
                return await self.engine.stats()
        except TimeoutError:
            raise ApiError(
                503, f"the engine has not answered within {STATS_SECONDS:g} s", code="engine_silent"
            ) from None
        except EngineError:
            raise self._engine_failed() from None

    def check_model(self, name: str | None, record: RequestRecord | None = None) -> None:
        """Raise ApiError (404) where a request names another model than the one that is served.

        record: of a request for text, which is to know the name.
        """
        if name is not None and name not in self.settings.model_names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {', '.join(self.settings.model_names)}",
                param="model",
                code="model_not_found",
            )
        if record is not None:
            record.model = name

    def deliver(self, request: Request, work: Work) -> Delivery:
        """The response that this work sends."""
        return Delivery(work, record_of(request), self.settings.request_timeout, self.admission)

    def answers(
        self,
        body: SamplingBody,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        make_reader: MakeReader,
        answer_id: str,
        record: RequestRecord,
        use: ToolUse | None = None,
    ) -> Answers:
        """The answers to these prompts, not yet begun.

        make_reader: of one answer with its sampling rules; record: of the request, which is to know of them; use: the
        tools of the request.
        """
        record.answers = Answers(
            self.engine,
            make_reader,
            self.metrics,
            prompts,
            params,
            answer_id=answer_id,
            started=record.started,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            grammar_field=grammar_field(body, use),
        )
        return record.answers
