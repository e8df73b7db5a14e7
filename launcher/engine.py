"""Starting an engine on all ranks, and rank 0's side of it: requests in, text out."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
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
from paceline.launcher.answer_text import AnswerText
from paceline.launcher.checkpoint_source import resolve_checkpoint
from paceline.launcher.choices import choice_seed
from paceline.launcher.executor import RankExecutor
from paceline.launcher.grammars import TokenizerGrammars
from paceline.launcher.termination import exit_on_signal
from paceline.launcher.tokenizer import Tokenizer, read_tokenizer_config
from paceline.worker.garbage import keep_all_that_is_here
from paceline.worker.loop import follow
from paceline.worker.memory import RankMemory
from paceline.worker.ranks import RankGroup, describe
from paceline.worker.worker import Worker


def make_config(
    model: str | os.PathLike[str] | None, tensor_parallel_size: int | None, settings: dict[str, Any]
) -> EngineConfig:
    """An EngineConfig whose model is still a name; without a number of ranks it takes what torchrun started.

    Raises InputError for an unknown setting.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InputError(f"unknown setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if tensor_parallel_size is None:
        tensor_parallel_size = int(os.environ.get("WORLD_SIZE", "1"))
    return EngineConfig(
        model="" if model is None else os.fspath(model), tensor_parallel_size=tensor_parallel_size, **settings
    )


def start_engine(config: EngineConfig) -> Engine:
    """Join the ranks, load the model on each, and return rank 0's engine.

    Once all ranks are ready, the others ignore SIGTERM and SIGINT, which are sent to all, and end when rank 0 closes
    the engine or is gone, so that none is taken for the one that failed.

    On every other rank this runs the steps that rank 0 plans until its engine is closed, and then ends the process
    (SystemExit), so that a script's later lines run once. Raises InputError on all ranks where the start fails.
    """
    ranks = RankGroup(config)
    try:
        return _start(config, ranks)
    except BaseException:
        ranks.abandon()
        raise


def _start(config: EngineConfig, ranks: RankGroup) -> Engine:
    folder = ""
    with ranks.together():
        if ranks.local_rank == 0:
            folder = str(resolve_checkpoint(config.model or None))
            read_tokenizer_config(Path(folder))  # what is wrong with it is told before the weights are read
    config = dataclasses.replace(config, model=ranks.exchange(folder)[0])
    devices = ranks.exchange(ranks.device_name)
    # It takes a second or more, and in a thread slows down all that launches kernels or reads weights, since both give
    # the interpreter away again and again: so it is read while this process waits for others, or else afterwards.
    read_tokenizer = functools.cache(lambda: Tokenizer(Path(config.model)) if ranks.rank == 0 else None)
    worker = Worker(config, ranks, meanwhile=read_tokenizer)
    with ranks.together():
        tokenizer = read_tokenizer()
    keep_all_that_is_here(ranks.device)
    shares = ranks.exchange(json.dumps(dataclasses.astuple(worker.memory)))
    if tokenizer is None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        reader = StepChannelReader.attach(ranks.exchange("")[0], ranks.rank - 1)
        ranks.watch(reader.check_writer)
        error = follow(worker, reader, ranks)
        reader.close()
        ranks.close()
        raise SystemExit(1 if error else 0)
    channel = None
    if ranks.size > 1:
        channel = StepChannelWriter.create(ranks.size - 1)
        ranks.exchange(channel.handle)
        channel.wait_attached()
        ranks.watch(channel.check_readers)
    memories = [RankMemory(*json.loads(share)) for share in shares]
    return Engine(config, ranks, worker, tokenizer, RankExecutor(worker, channel, memories), devices)


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
    prompt_logprobs: Sequence[TokenLogprobs]
    error: str


class Engine:
    """Rank 0's engine: the coordinator over all ranks, and the tokenizer before it."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: RankGroup,
        worker: Worker,
        tokenizer: Tokenizer,
        executor: RankExecutor,
        devices: Sequence[str],
    ) -> None:
        self.config = config
        self.limits = worker.limits
        self.tokenizer = tokenizer
        self.device = ranks.device
        self.devices = tuple(devices)
        """What each rank runs on, as its own words have it."""
        self._ranks = ranks
        self._executor = executor
        self.end_ids = tuple(dict.fromkeys((*worker.model_config.eos_token_ids, *tokenizer.end_ids)))
        """Token ids that end an answer, of the checkpoint's configs and its tokenizer."""
        self._grammars: TokenizerGrammars | None = None
        if tokenizer.backend is not None:
            self._grammars = TokenizerGrammars(tokenizer, worker.limits.vocab_size, self.end_ids)
        self.coordinator = Coordinator(config, worker.limits, executor, self._grammars)
        self._answers: dict[str, AnswerText] = {}
        self._ids = itertools.count()
        self._failed: EngineError | None = None
        self._closed = False
        self._restore_signal = _explain_termination(executor)
        atexit.register(self._close_at_exit)

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[str]:
        """Queue a prompt; returns the request ids of its n choices. Raises InputError where it can never run."""
        self._check_usable()
        if params.stop and self.tokenizer.backend is None:
            raise InputError("stop texts need a tokenizer, and the model's folder has none; use stop_token_ids")
        if params.grammar is not None and self._grammars is not None:
            try:
                self._grammars.check(params.grammar)
            except InputError as error:
                raise InputError(f"grammar cannot be used: {error}") from error
        request_ids: list[str] = []
        try:
            for index in range(params.n):
                request_id = str(next(self._ids))
                seed = choice_seed(params.seed, index)
                single = params if params.n == 1 else dataclasses.replace(params, n=1, seed=seed)
                self.coordinator.add_request(request_id, prompt_token_ids, single, eos_token_ids=self.end_ids)
                self._answers[request_id] = AnswerText(self.tokenizer, params)
                request_ids.append(request_id)
        except InputError:
            self.abort(request_ids)
            raise
        return request_ids

    def prepare_grammars(self) -> None:
        """Make ready for grammars before the first request has one, whose coming would hold up all others."""
        if self._grammars is not None:
            self._grammars.prepare()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; finished and unknown ones are passed over."""
        for request_id in request_ids:
            self._answers.pop(request_id, None)
            self.coordinator.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do."""
        return self._failed is None and self.coordinator.has_work

    def step(self) -> list[ChoiceUpdate]:
        """Advance all requests by about one step; what is new of them. Raises EngineError where a rank failed."""
        self._check_usable()
        try:
            events = self.coordinator.step()
        except EngineError as error:
            self._failed = error
            self.close(str(error))
            raise
        return [update for event in events if (update := self._update(event)) is not None]

    def _update(self, event: RequestEvent) -> ChoiceUpdate | None:
        answer = self._answers.get(event.request_id)
        if answer is None:  # aborted here
            return None
        finish_reason = event.finish_reason
        text = answer.feed(event.token_ids, last=finish_reason is not None, stop_token=event.stop_token)
        if answer.stop_text is not None:
            if finish_reason is None:
                self.coordinator.abort(event.request_id, "stop")  # the final event comes with the next step
            else:
                finish_reason = "stop"
        if finish_reason is not None:
            del self._answers[event.request_id]
        stop_reason = None if finish_reason is None else answer.stop_text or answer.stop_token(event.stop_token)
        return ChoiceUpdate(
            event.request_id,
            text,
            event.token_ids,
            event.logprobs,
            event.cached_tokens,
            finish_reason,
            stop_reason,
            event.timings,
            event.prompt_logprobs,
            event.error,
        )

    def check_ranks(self) -> None:
        """Raise EngineError naming another rank that is gone. A step does it too; this is for when there is none."""
        self._executor.check_ranks()

    def _check_usable(self) -> None:
        """Raise EngineError once the engine has failed or is closed."""
        if self._failed is not None:
            raise self._failed
        if self._closed:
            raise EngineError("this engine is closed; make a new LLM")

    def close(self, error: str = "") -> None:
        """End the other ranks, non-zero where there is an error, and leave the group. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        gc.unfreeze()
        atexit.unregister(self._close_at_exit)
        self._restore_signal()
        self._executor.close(error)
        if error:
            self._ranks.abandon()
        else:
            self._ranks.close()

    def _close_at_exit(self) -> None:
        """A script that ends without closing must not leave the other ranks waiting; they end as it does."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else describe(error))


def _explain_termination(executor: RankExecutor) -> Callable[[], object]:
    """When torchrun ends this rank because another has died, say which, as an EngineError of whatever runs now.

    torchrun sends SIGTERM to the other ranks within a tenth of a second of a death, and the step that the dead rank
    breaks may not have failed here by then. A handler of the program's own is left alone. The result undoes this.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before not in (signal.SIG_DFL, exit_on_signal):
        return lambda: None

    def on_terminate(number: int, frame: FrameType | None) -> None:
        executor.check_ranks()
        exit_on_signal(number, frame)

    def restore() -> None:
        # Only the main thread may; the handler does no harm where another has closed the engine. Who has set another
        # handler since wants to keep it.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is on_terminate:
            signal.signal(signal.SIGTERM, before)

    signal.signal(signal.SIGTERM, on_terminate)
    return restore
