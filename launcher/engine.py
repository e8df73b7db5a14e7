"""Starting an engine on all ranks, and rank 0's side of it: requests in, text out."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.coordinator.channel import StepChannelReader, StepChannelWriter
from paceline.coordinator.config import EngineConfig
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.events import RequestEvent, RequestTimings
from paceline.coordinator.messages import TokenLogprobs
from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.checkpoint_source import resolve_checkpoint
from paceline.launcher.detokenizer import Detokenizer
from paceline.launcher.executor import RankExecutor
from paceline.launcher.stop_strings import StopStrings
from paceline.launcher.tokenizer import Tokenizer
from paceline.worker.loop import follow
from paceline.worker.ranks import RankGroup
from paceline.worker.worker import Worker


def make_config(model: str | None, tensor_parallel_size: int | None, settings: dict[str, Any]) -> EngineConfig:
    """An EngineConfig whose model is still a name; without a number of ranks it takes what torchrun started.

    Raises InputError for an unknown setting.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InputError(f"unknown setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if tensor_parallel_size is None:
        tensor_parallel_size = int(os.environ.get("WORLD_SIZE", "1"))
    return EngineConfig(model=model or "", tensor_parallel_size=tensor_parallel_size, **settings)


def start_engine(config: EngineConfig) -> Engine:
    """Join the ranks, load the model on each, and return rank 0's engine.

    On every other rank this runs the steps that rank 0 plans until its engine is closed, and then ends the process
    (SystemExit), so that a script's later lines run once. Raises InputError on all ranks where the start fails.
    """
    ranks = RankGroup(config)
    folder = ""
    with ranks.together():
        if ranks.local_rank == 0:
            folder = str(resolve_checkpoint(config.model or None))
    config = dataclasses.replace(config, model=ranks.exchange(folder)[0])
    worker = Worker(config, ranks)
    if ranks.rank > 0:
        reader = StepChannelReader.attach(ranks.exchange("")[0], ranks.rank - 1)
        follow(worker, reader, ranks)
        reader.close()
        ranks.close()
        raise SystemExit(0)
    channel = None
    if ranks.size > 1:
        channel = StepChannelWriter.create(ranks.size - 1)
        ranks.exchange(channel.handle)
        channel.wait_attached()
    return Engine(config, ranks, worker, RankExecutor(worker, channel))


@dataclasses.dataclass(slots=True)
class ChoiceUpdate:
    """News of one request of the coordinator, as text."""

    request_id: str
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    cached_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None
    timings: RequestTimings | None


class _Choice:
    """The text side of one running request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.params = params
        self._detokenizer = None
        if tokenizer.backend is not None:
            self._detokenizer = Detokenizer(tokenizer.backend, skip_special_tokens=params.skip_special_tokens)
        self._stop_strings = StopStrings(tuple(params.stop), params.include_stop_str_in_output)

    def feed(self, token_ids: Sequence[int], last: bool) -> tuple[str, str | None]:
        """New text that is safe to show, and the stop text that was met, if any."""
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.feed(token_ids)
        if last:
            text += self._detokenizer.finish()
        text = self._stop_strings.feed(text)
        if last and self._stop_strings.matched is None:
            text += self._stop_strings.finish()
        return text, self._stop_strings.matched


class Engine:
    """Rank 0's engine: the coordinator over all ranks, and the tokenizer before it."""

    def __init__(self, config: EngineConfig, ranks: RankGroup, worker: Worker, executor: RankExecutor) -> None:
        self.config = config
        self.limits = worker.limits
        self.tokenizer = Tokenizer(Path(config.model))
        self.device = ranks.device
        self._ranks = ranks
        self._executor = executor
        self._end_ids = tuple(dict.fromkeys((*worker.model_config.eos_token_ids, *self.tokenizer.end_ids)))
        self.coordinator = Coordinator(config, worker.limits, executor)
        self._choices: dict[str, _Choice] = {}
        self._ids = itertools.count()
        self._failed: EngineError | None = None
        self._closed = False
        _explain_termination(executor)
        atexit.register(self.close)  # a script that ends without closing must not leave the other ranks waiting

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[str]:
        """Queue a prompt; returns the request ids of its n choices. Raises InputError where it can never run."""
        if self._closed:
            raise EngineError("this engine is closed; make a new LLM")
        if self._failed is not None:
            raise self._failed
        if params.stop and self.tokenizer.backend is None:
            raise InputError("stop texts need a tokenizer, and the model's folder has none; use stop_token_ids")
        request_ids: list[str] = []
        try:
            for index in range(params.n):
                request_id = str(next(self._ids))
                single = dataclasses.replace(params, n=1, seed=choice_seed(params.seed, index))
                self.coordinator.add_request(request_id, prompt_token_ids, single, eos_token_ids=self._end_ids)
                self._choices[request_id] = _Choice(self.tokenizer, params)
                request_ids.append(request_id)
        except InputError:
            self.abort(request_ids)
            raise
        return request_ids

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; finished and unknown ones are passed over."""
        for request_id in request_ids:
            self._choices.pop(request_id, None)
            self.coordinator.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do."""
        return self._failed is None and self.coordinator.has_work

    def step(self) -> list[ChoiceUpdate]:
        """Advance all requests by about one step; what is new of them. Raises EngineError where a rank failed."""
        try:
            events = self.coordinator.step()
        except EngineError as error:
            self._failed = error
            self.close()
            raise
        return [update for event in events if (update := self._update(event)) is not None]

    def _update(self, event: RequestEvent) -> ChoiceUpdate | None:
        choice = self._choices.get(event.request_id)
        if choice is None:  # aborted here, or stopped by a stop text one step ago
            return None
        text, stop_text = choice.feed(event.token_ids, last=event.finish_reason is not None)
        finish_reason = event.finish_reason
        stop_reason: int | str | None = event.stop_token if event.stop_token in choice.params.stop_token_ids else None
        if stop_text is not None:
            stop_reason = stop_text
            if finish_reason is None:
                self.coordinator.abort(event.request_id, "stop")
            finish_reason = "stop"
        if finish_reason is not None:
            del self._choices[event.request_id]
        return ChoiceUpdate(
            request_id=event.request_id,
            text=text,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            cached_tokens=event.cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            timings=event.timings,
        )

    def close(self) -> None:
        """End the other ranks and leave the group. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._executor.close("" if self._failed is None else str(self._failed))
        if self._failed is None:
            self._ranks.close()


def _explain_termination(executor: RankExecutor) -> None:
    """When torchrun ends this rank because another has died, say which, as an EngineError of whatever runs now.

    torchrun sends SIGTERM to the other ranks within a tenth of a second of a death, and the step that the dead rank
    breaks may not have failed here by then. A handler of the program's own is left alone.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def on_terminate(number: int, frame: FrameType | None) -> None:
        executor.check_ranks()
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, on_terminate)


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of a prompt's index-th choice: the given one for the first, the others derived from it (64-bit)."""
    if seed is None or index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    return mixed - 2**64 if mixed >= 2**63 else mixed
