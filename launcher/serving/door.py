"""What all routes of a server work with."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request

from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.dialects.dialect import find_dialect
from paceline.launcher.serving.admission import Admission
from paceline.launcher.serving.answers import Answers, MakeReader
from paceline.launcher.serving.delivery import Delivery, Work
from paceline.launcher.serving.engine_api import EngineApi, EngineInfo
from paceline.launcher.serving.errors import ApiError
from paceline.launcher.serving.metrics import ServerMetrics
from paceline.launcher.serving.prompts import Prompt, PromptReader
from paceline.launcher.serving.record import record_of
from paceline.launcher.serving.schemas import SamplingBody
from paceline.launcher.serving.settings import ServerSettings
from paceline.launcher.serving.structured import GrammarCheck
from paceline.launcher.serving.token_texts import TokenTexts
from paceline.launcher.tokenizer import Tokenizer


class Door:
    """An engine, the tokenizer before it, and what is counted of the requests to it."""

    def __init__(self, engine: EngineApi, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = ServerMetrics()
        self.admission = Admission(settings.max_queue)
        self.metrics.accepted.set_function(lambda: self.admission.accepted)
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
            raise ApiError(503, "the engine has failed; the server's log says why", code="engine_failed")
        if self.engine.info is None:
            raise ApiError(503, "the model is still loading", code="not_ready")
        return self.engine.info

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) where a request names another model than the one that is served."""
        if name is not None and name not in self.settings.model_names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {', '.join(self.settings.model_names)}",
                param="model",
                code="model_not_found",
            )

    def deliver(self, request: Request, work: Work) -> Delivery:
        """The response that this work sends."""
        return Delivery(work, record_of(request), self.settings.request_timeout)

    def answers(
        self,
        body: SamplingBody,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        make_reader: MakeReader,
        answer_id: str,
        started: float,
    ) -> Answers:
        """The answers to these prompts, not yet begun.

        make_reader: of one answer with its sampling rules; started: when the request came, on time.monotonic().
        """
        return Answers(
            self.engine,
            make_reader,
            self.metrics,
            prompts,
            params,
            request_id=answer_id,
            started=started,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
        )
