"""The loop that owns all requests: takes them in, plans one step ahead of the device, and hands their tokens out."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from paceline.coordinator.block_manager import BlockManager, BlockTable
from paceline.coordinator.config import EngineConfig
from paceline.coordinator.constraints import Constraints, Grammars
from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.events import CoordinatorStats, RequestEvent, RequestTimings
from paceline.coordinator.executor import Executor
from paceline.coordinator.messages import Limits, StepResult, TokenLogprobs
from paceline.coordinator.policies import policy_named
from paceline.coordinator.prefix_cache import PrefixCache, PrefixChain
from paceline.coordinator.request import Request, Status, check_prompt, resolve_sampling, resolve_stop_ids
from paceline.coordinator.sampling_params import SamplingParams
from paceline.coordinator.scheduler import ScheduledStep, Scheduler
from paceline.coordinator.step_times import StepTimes
from paceline.coordinator.view import MOST_WAITING_SHOWN, STEPS_REMEMBERED, EngineView, StepLine, line_of

MAX_IN_FLIGHT = 2
"""Steps submitted and not yet collected: one that runs, and one queued behind it."""


class Coordinator:
    """Runs requests on an executor. One thread owns it; nothing here blocks except `step`."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        executor: Executor,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """grammars: of the model's tokenizer; without them requests can have none."""
        self._limits = limits
        self._executor = executor
        self._clock = clock
        self._max_len, self._max_len_setting = min(
            (limits.max_model_len, "max_model_len"), (limits.num_blocks * config.block_size, "num_blocks * block_size")
        )
        cache = PrefixCache(config.block_size, enabled=config.prefix_cache)
        self._scheduler = Scheduler(
            BlockManager(limits.num_blocks, config.block_size, cache),
            policy_named(config.policy),
            max_running=config.max_num_seqs,
            token_budget=config.max_batched_tokens,
        )
        self._requests: dict[str, Request] = {}
        self._constraints = Constraints(grammars)
        self._in_flight: deque[ScheduledStep] = deque()
        self._steps: deque[StepLine] = deque(maxlen=STEPS_REMEMBERED)
        self._events: list[RequestEvent] = []
        self._num_arrived = 0
        self._generated_tokens = 0
        self._finished: Counter[str] = Counter()
        self.step_times = StepTimes()
        """Whoever does more of a step's work outside adds to it."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue one request for one answer; the caller expands n > 1.

        eos_token_ids: the model's end-of-text ids, which end the answer unless params.ignore_eos.
        priority: lower goes first; equal ones in order of arrival.
        cache_salt: only requests of the same salt share cached prefixes.

        Raises InputError for what can never run as given: an id in use, a prompt that is empty, too long, or holds
        something else than token ids of the vocabulary, sampling rules outside it, and a grammar where none can be
        followed. What is wrong in a grammar is found out later, and ends the request with an error.
        """
        if request_id in self._requests:
            raise InputError(f"request id {request_id!r} is in use: choose another")
        if params.n != 1:
            raise InputError(f"n is {params.n}: add one request per answer")
        token_ids = check_prompt(prompt_token_ids, self._limits.vocab_size, self._max_len, self._max_len_setting)
        stop_ids = resolve_stop_ids(params, eos_token_ids, self._limits.vocab_size)
        max_len = self._max_len
        if params.max_tokens is not None:
            max_len = min(max_len, len(token_ids) + params.max_tokens)
        request = Request(
            id=request_id,
            token_ids=token_ids,
            prompt_len=len(token_ids),
            max_len=max_len,
            sampling=resolve_sampling(params, stop_ids),
            stop_ids=frozenset(stop_ids),
            rank=(priority, self._num_arrived),
            table=BlockTable(PrefixChain(cache_salt)),
            arrived=self._clock(),
            num_known=len(token_ids),
            end_ids_to_avoid=tuple(eos_token_ids) if params.ignore_eos else (),
        )
        if params.grammar is None or request.ends_with_its_prompt:
            self._scheduler.add(request)
        else:
            self._constraints.begin(request, params.grammar)
        self._num_arrived += 1
        self._requests[request_id] = request
        if request.ends_with_its_prompt and request.prompt_len == 1:
            # Nothing comes before its only token, so there is nothing to compute.
            self._finish(request, _news(request), "length", self._clock())

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request now; its last event, with this finish_reason, comes with the next `step`.

        An id that is unknown or already finished is left alone: the caller cannot know what just ended.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, _news(request), reason, self._clock())

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests or self._in_flight or self._events)

    def step(self) -> list[RequestEvent]:
        """Keep the device busy and return what happened since the last call.

        Waits only where there is no news yet and nothing more to submit. Raises EngineError where a rank failed.
        """
        self._collect_ready()
        self._queue_compiled()
        planned = len(self._in_flight) < MAX_IN_FLIGHT and self._submit_next()
        self._collect_ready()  # an executor that computes in `submit` has the result already
        must_wait = not planned or len(self._in_flight) == MAX_IN_FLIGHT
        if self._in_flight and not self._events and must_wait:
            self._collect(wait=True)
        elif not self._in_flight and not self._events and self._constraints.num_compiling:
            self._constraints.wait()
        events, self._events = self._events, []
        return events

    def stats(self) -> CoordinatorStats:
        """Gauges and counters, for metrics."""
        scheduler = self._scheduler
        return CoordinatorStats(
            waiting=len(scheduler.waiting) + self._constraints.num_compiling,
            running=len(scheduler.running),
            blocks=scheduler.blocks.usage,
            steps=scheduler.num_steps,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            cached_prompt_tokens=scheduler.cached_prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=dict(self._finished),
            step_seconds=self.step_times.parts(),
            step_requests=self.step_times.requests.copy(),
            step_tokens=self.step_times.tokens.copy(),
            ranks=self._executor.rank_states(),
        )

    def view(self) -> EngineView:
        """What goes on, for people who watch: a copy, whose making costs a memcpy of the block holders and a line for
        each request shown, and never a loop over tokens or blocks."""
        scheduler, now = self._scheduler, self._clock()
        shown = (*scheduler.running, *scheduler.waiting[:MOST_WAITING_SHOWN])
        return EngineView(
            taken=now,
            stats=self.stats(),
            block_holders=scheduler.blocks.block_holders[:],
            requests=[line_of(request, now) for request in shown],
            steps=list(self._steps),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where the bookkeeping contradicts itself; costs O(blocks), for tests."""
        self._scheduler.check_invariants()

    def _submit_next(self) -> bool:
        """Plan and submit a step; False where no request can take a token before a result is back."""
        started = self._clock()
        scheduled = self._scheduler.schedule(started)
        if scheduled is None:
            if len(self._requests) > self._constraints.num_compiling and not self._in_flight:
                raise EngineError("no request can go on and no step is in flight: the scheduler is stuck, restart")
            return False
        planned = self._clock()
        self._in_flight.append(scheduled)
        self._steps.append(scheduled.line)
        self._executor.submit(scheduled.plan)
        times = self.step_times
        times.plan.add(planned - started)
        times.launch.add(self._clock() - planned)
        self._scheduler.publish_planned()
        times.requests.add(scheduled.line.rows)
        times.tokens.add(scheduled.line.prompt_tokens + scheduled.line.decode_tokens)
        return True

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammars are ready; one that allows no first token, or is wrong, ends at once."""
        for request in self._constraints.take_compiled():
            self._scheduler.add(request)
            if request.constraint is not None and request.constraint.finish_reason is not None:
                self._finish(request, _news(request), request.constraint.finish_reason, self._clock())

    def _collect_ready(self) -> None:
        while self._in_flight and self._collect(wait=False):
            pass

    def _collect(self, *, wait: bool) -> bool:
        asked = self._clock()
        result = self._executor.collect(wait)
        if result is None:
            return False
        came = self._clock()
        self._apply(self._in_flight.popleft(), result, came)
        self.step_times.wait.add(came - asked)
        self.step_times.apply.add(self._clock() - came)
        return True

    def _apply(self, scheduled: ScheduledStep, result: StepResult, now: float) -> None:
        """Hand each sampled token to its request, unless that ended while the step was in flight."""
        self._check_result(scheduled, result)
        self._take_prompt_logprobs(scheduled, result, now)
        logprobs = result.logprobs or (None,) * len(result.token_ids)
        running = [
            each
            for each in zip(scheduled.sampled, result.token_ids, logprobs, strict=True)
            if each[0].status is not Status.FINISHED
        ]
        for request, token, _ in running:
            request.token_ids.append(token)
        # All at once, since a grammar library works on several answers side by side.
        self._constraints.advance(
            [each for each, _, _ in running if each.constraint is not None and each.finish_reason() is None]
        )
        self._generated_tokens += len(running)
        for request, token, logprob in running:
            self._hand_out(request, token, logprob, now)

    def _take_prompt_logprobs(self, scheduled: ScheduledStep, result: StepResult, now: float) -> None:
        """Keep what a step says of prompts, until all is there. After preemption some of it comes again."""
        taken = 0
        for request, first, number in scheduled.scored:
            entries = result.prompt_logprobs[taken : taken + number]
            taken += number
            if request.status is Status.FINISHED:
                continue
            request.prompt_logprobs.extend(entries[len(request.prompt_logprobs) - first :])
            if request.ends_with_its_prompt and len(request.prompt_logprobs) == request.prompt_len - 1:
                self._finish(request, _news(request, prompt_logprobs=request.prompt_logprobs), "length", now)

    def _check_result(self, scheduled: ScheduledStep, result: StepResult) -> None:
        step, count = scheduled.plan.step, len(scheduled.sampled)
        if result.step != step or len(result.token_ids) != count:
            raise EngineError(
                f"ranks answered step {result.step} with {len(result.token_ids)} tokens, "
                f"but step {step} samples {count}"
            )
        scores = sum(number for _, _, number in scheduled.scored)
        if len(result.prompt_logprobs) != scores:
            raise EngineError(
                f"ranks gave the log-probabilities of {len(result.prompt_logprobs)} prompt tokens in step {step}, "
                f"not of {scores}"
            )
        vocab_size = self._limits.vocab_size
        if count and (min(result.token_ids) < 0 or max(result.token_ids) >= vocab_size):
            bad = next(token for token in result.token_ids if not 0 <= token < vocab_size)
            raise EngineError(f"ranks sampled token {bad} in step {step}, but the vocabulary has {vocab_size} tokens")

    def _hand_out(self, request: Request, token: int, logprob: TokenLogprobs | None, now: float) -> None:
        """Make the latest token of a request known: to the prefix cache, and to who asked."""
        self._scheduler.blocks.publish(request.table, request.token_ids, request.num_computed)
        event = _news(request, (token,), () if logprob is None else (logprob,))
        if request.first_token is None:
            request.first_token = now
            event.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        reason = request.finish_reason()
        if reason is None:
            self._events.append(event)
        else:
            event.stop_token = token if token in request.stop_ids else None
            self._finish(request, event, reason, now)

    def _finish(self, request: Request, event: RequestEvent, reason: str, now: float) -> None:
        """Take a request out everywhere and hand out its last event."""
        if self._constraints.drop(request):
            request.status = Status.FINISHED  # no queue has it yet
        else:
            self._scheduler.finish(request)
        del self._requests[request.id]
        self._finished[reason] += 1
        event.finish_reason = reason
        if request.constraint is not None:
            event.error = request.constraint.error
        event.timings = RequestTimings(request.arrived, request.first_scheduled, request.first_token, now)
        self._events.append(event)


def _news(
    request: Request,
    token_ids: Sequence[int] = (),
    logprobs: Sequence[TokenLogprobs] = (),
    prompt_logprobs: Sequence[TokenLogprobs] = (),
) -> RequestEvent:
    return RequestEvent(
        request.id,
        token_ids,
        logprobs,
        request.prompt_len,
        request.cached_tokens,
        prompt_logprobs=prompt_logprobs,
    )
