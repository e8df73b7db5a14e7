"""A worker made of plain Python, and a harness that runs a coordinator against it.

The worker knows nothing but the plans. It keeps slots, tokens and block tables as a rank would, and a cache in which
each place holds the hash of all tokens up to its position. Whoever reads a block that was not written, was overwritten,
or belongs to another history, is caught at once; every rule of the messages is checked on the way.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.constraints import GrammarError, Mask
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.events import RankState, RequestEvent
from paceline.coordinator.messages import (
    Admission,
    Limits,
    RowSampling,
    StepPlan,
    StepResult,
    StepRows,
    TokenLogprobs,
)
from paceline.coordinator.sampling_params import SamplingParams

VOCAB_SIZE = 1000
EMPTY = 0
END_ID = 999
"""What an answer by a grammar may end with."""


def extend_hash(previous: int, token: int) -> int:
    """Stands for the key and value of a token, which depend on everything before it."""
    return hash((previous, token))


class ToyGrammars:
    """Grammars "P N": which tokens may come next depends on all that came before, one in P or so.

    After N tokens the answer may end, after 2 N it must. "P N !" errs after N tokens, "wrong" when it is compiled. With
    `hold` set, compiling ends when the test says so.
    """

    def __init__(self) -> None:
        self.hold = False
        self.held: list[tuple[Future[tuple[object, Mask]], str]] = []

    def compile(self, grammar: str) -> Future[tuple[object, Mask]]:
        future: Future[tuple[object, Mask]] = Future()
        self.held.append((future, grammar))
        if not self.hold:
            self.release()
        return future

    def release(self) -> None:
        """Finish what was asked to be compiled."""
        for future, grammar in self.held:
            if not future.set_running_or_notify_cancel():
                continue
            if grammar == "wrong":
                future.set_exception(GrammarError("this one is wrong"))
            else:
                future.set_result(((grammar, history := []), toy_mask(grammar, history)))
        self.held = []

    def advance(self, steps: Sequence[tuple[object, int]]) -> Sequence[Mask | GrammarError]:
        return [self._advance(*matcher, token) for matcher, token in steps]  # type: ignore[misc]

    def _advance(self, grammar: str, history: list[int], token: int) -> Mask | GrammarError:
        assert is_set(toy_mask(grammar, history), token), "a token came that no mask allowed"
        history.append(token)
        if grammar.endswith("!") and len(history) == int(grammar.split()[1]):
            return GrammarError("too hard to follow")
        return toy_mask(grammar, history)


def toy_mask(grammar: str, history: Sequence[int]) -> Mask:
    period, length = map(int, grammar.split()[:2])
    bits = every(period, hash(tuple(history)) % period) if len(history) < 2 * length else 0
    bits &= ~(1 << END_ID)
    bits |= (len(history) >= length) << END_ID
    return bits.to_bytes(-(-VOCAB_SIZE // 32) * 4, "little")


@functools.cache
def every(period: int, first: int) -> int:
    return sum(1 << token for token in range(first, VOCAB_SIZE, period))


def is_set(mask: Mask, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def toy_token(prefix_hash: int, num_output: int, sampling: RowSampling, mask: Mask | None = None) -> int:
    """The toy model: the next token depends on the whole history, the output's length, and the request's seed."""
    token = hash((prefix_hash, num_output, sampling.seed)) % VOCAB_SIZE
    while (token in sampling.stop_ids and num_output < sampling.min_tokens) or not (
        mask is None or is_set(mask, token)
    ):
        token = (token + 1) % VOCAB_SIZE
    return token


@dataclass
class Slot:
    """A row of the worker's state."""

    tokens: list[int]
    prompt_len: int
    num_computed: int
    blocks: list[int]
    sampling: RowSampling
    hashes: list[int] = field(default_factory=list)
    """What the cache must hold for each computed token."""


def toy_scores(slot: Slot, count: int) -> list[TokenLogprobs]:
    """What computing count tokens says of those that follow in the prompt: their ids and places."""
    if slot.sampling.prompt_logprobs < 0:
        return []
    end = min(slot.num_computed + count + 1, slot.prompt_len)
    return [TokenLogprobs(-float(slot.tokens[place]), rank=place) for place in range(slot.num_computed + 1, end)]


class MirrorExecutor:
    """Rebuilds the workers' state from the plans alone, and fails on the first plan that breaks a rule.

    A result is ready when delay() later steps are submitted: 0 computes in submit, 1 behaves as a device does.
    """

    def __init__(self, config: EngineConfig, limits: Limits, delay: Callable[[], int]) -> None:
        self.plans: list[StepPlan] = []
        self.rows: list[StepRows] = []
        self.token_counts: list[int] = []
        self.admissions: list[Admission] = []
        self.slots: dict[int, Slot] = {}
        self.most_in_flight = 0
        self.num_waits = 0
        self.delay = delay
        self._config = config
        self._limits = limits
        self._cache = [[EMPTY] * config.block_size for _ in range(limits.num_blocks)]
        self._holders: Counter[int] = Counter()
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert plan.step == len(self.plans), "plans are numbered without gaps"
        self.plans.append(plan)
        for slot in plan.freed:
            self._holders.subtract(self.slots.pop(slot).blocks)
        for admission in plan.admissions:
            self._admit(admission)
        for slot, blocks in plan.block_appends:
            self._give_blocks(self.slots[slot], blocks)
        rows = plan.rows if plan.rows is not None else self.rows[-1]
        self.rows.append(rows)
        self._check_rows(rows)
        self._results.append(self._compute(plan.step, rows, dict(plan.masks)))
        self.most_in_flight = max(self.most_in_flight, len(self._results))

    @property
    def num_uncollected(self) -> int:
        return len(self._results)

    def collect(self, wait: bool) -> StepResult | None:
        if wait:
            self.num_waits += 1
            assert self._results, "waiting for a result that no step will give"
            return self._results.popleft()
        if len(self._results) > self.delay():
            return self._results.popleft()
        return None

    def rank_states(self) -> Sequence[RankState]:
        return []

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots, "a slot is given away while in use"
        assert 0 <= admission.slot < self._config.max_num_seqs
        assert 0 < admission.prompt_len <= len(admission.token_ids)
        assert 0 <= admission.num_computed < len(admission.token_ids), "at least one token is computed"
        tokens = list(admission.token_ids)
        slot = Slot(tokens, admission.prompt_len, admission.num_computed, [], admission.sampling)
        previous = EMPTY
        for token in tokens[: admission.num_computed]:
            previous = extend_hash(previous, token)
            slot.hashes.append(previous)
        self._give_blocks(slot, admission.block_ids)
        self.slots[admission.slot] = slot
        self._check_readable(slot)
        self.admissions.append(admission)

    def _give_blocks(self, slot: Slot, blocks: Sequence[int]) -> None:
        assert all(0 <= block < self._limits.num_blocks for block in blocks)
        slot.blocks.extend(blocks)
        self._holders.update(blocks)
        assert len(set(slot.blocks)) == len(slot.blocks), "a block stands twice in one table"

    def _check_rows(self, rows: StepRows) -> None:
        assert len(rows.slots) == len(rows.counts) == len(rows.samples) > 0
        assert len(set(rows.slots)) == len(rows.slots), "a slot has two rows"
        assert all(count >= 1 for count in rows.counts)
        self.token_counts.append(sum(rows.counts))
        assert self.token_counts[-1] <= self._config.max_batched_tokens
        ones = [count == 1 for count in rows.counts]
        assert ones == sorted(ones, reverse=True), "rows of one token come first"

    def _compute(self, step: int, rows: StepRows, masks: dict[int, Mask]) -> StepResult:
        parts = list(zip(rows.slots, rows.counts, rows.samples, strict=True))
        scores = [each for slot_id, count, _ in parts for each in toy_scores(self.slots[slot_id], count)]
        for slot_id, count, _ in parts:
            self._store(self.slots[slot_id], count)
        assert masks.keys() <= {slot for slot, _, samples in parts if samples}, "a mask for a row that does not sample"
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for slot_id, _, samples in parts:
            slot = self.slots[slot_id]
            self._check_readable(slot)
            assert samples == (slot.num_computed == len(slot.tokens)), "sampling is for the last known token"
            if samples:
                num_output = len(slot.tokens) - slot.prompt_len
                token = toy_token(slot.hashes[-1], num_output, slot.sampling, masks.get(slot_id))
                slot.tokens.append(token)
                token_ids.append(token)
                logprobs.append(TokenLogprobs(-float(token)) if slot.sampling.logprobs >= 0 else None)
        return StepResult(step, token_ids, logprobs if any(logprobs) else (), scores)

    def _store(self, slot: Slot, count: int) -> None:
        """Compute count tokens: what was read from the cache goes into what is written."""
        size = self._config.block_size
        assert slot.num_computed + count <= len(slot.tokens), "only known tokens can be computed"
        for position in range(slot.num_computed, slot.num_computed + count):
            block = slot.blocks[position // size]
            assert self._holders[block] == 1, "a shared block is overwritten"
            value = extend_hash(slot.hashes[-1] if slot.hashes else EMPTY, slot.tokens[position])
            self._cache[block][position % size] = value
            slot.hashes.append(value)
        slot.num_computed += count
        assert slot.num_computed < self._limits.max_model_len, "the last token of an answer is never computed"

    def _check_readable(self, slot: Slot) -> None:
        """The whole history is in the cache, where the block table says."""
        size = self._config.block_size
        assert len(slot.hashes) == slot.num_computed
        for index in range(-(-slot.num_computed // size)):
            expected = slot.hashes[index * size : (index + 1) * size]
            assert self._cache[slot.blocks[index]][: len(expected)] == expected, "a block holds another history"


@dataclass
class Answer:
    """What came out for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    final: RequestEvent | None = None


class Harness:
    """A coordinator on a MirrorExecutor; checks all invariants after every step."""

    def __init__(self, config: EngineConfig, limits: Limits, delay: int) -> None:
        self.executor = MirrorExecutor(config, limits, lambda: delay)
        self.now = 0.0
        self.grammars = ToyGrammars()
        self.coordinator = Coordinator(config, limits, self.executor, self.grammars, clock=lambda: self.now)
        self.answers: dict[str, Answer] = {}

    def add(self, request_id: str, prompt: Sequence[int], **kwargs: Any) -> None:
        """Sampling parameters and options of add_request, by their names; seed 0 where none is given."""
        options = {name: kwargs.pop(name) for name in ("eos_token_ids", "priority", "cache_salt") if name in kwargs}
        self.coordinator.add_request(request_id, prompt, SamplingParams(**{"seed": 0, **kwargs}), **options)
        assert request_id not in self.answers
        self.answers[request_id] = Answer()

    def step(self) -> list[RequestEvent]:
        self.now += 1.0
        events = self.coordinator.step()
        self.coordinator.check_invariants()
        for event in events:
            answer = self.answers[event.request_id]
            assert answer.final is None, "an event came after the last one"
            answer.tokens.extend(event.token_ids)
            answer.logprobs.extend(event.logprobs)
            answer.prompt_logprobs.extend(event.prompt_logprobs)
            if event.finish_reason is not None:
                answer.final = event
        return events

    def run(self) -> dict[str, list[int]]:
        """Step until nothing is left; the output tokens of every request so far."""
        while self.coordinator.has_work:
            self.step()
        assert all(answer.final is not None for answer in self.answers.values())
        assert self.executor.num_uncollected == 0
        assert self.coordinator.stats().blocks.used == 0
        return {request_id: answer.tokens for request_id, answer in self.answers.items()}

    def final(self, request_id: str) -> RequestEvent:
        event = self.answers[request_id].final
        assert event is not None, "the request goes on"
        return event


@pytest.fixture
def make_harness() -> Callable[..., Harness]:
    """Build a harness from engine settings, small ones unless given."""

    def build(*, num_blocks: int = 200, max_model_len: int = 400, delay: int = 1, **settings: Any) -> Harness:
        config = EngineConfig(model="toy", **{"block_size": 4, "max_num_seqs": 8, "max_batched_tokens": 32, **settings})
        return Harness(config, Limits(VOCAB_SIZE, max_model_len, num_blocks), delay)

    return build


@pytest.fixture
def toy_answer() -> Callable[..., list[int]]:
    """What a request must answer, computed without any engine."""

    def answer(
        prompt: Iterable[int],
        max_tokens: int,
        *,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        grammar: str | None = None,
    ) -> list[int]:
        prefix_hash = EMPTY
        for token in prompt:
            prefix_hash = extend_hash(prefix_hash, token)
        sampling = RowSampling(temperature=1.0, seed=seed)
        tokens: list[int] = []
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in stop_ids):
            mask = None if grammar is None else toy_mask(grammar, tokens)
            tokens.append(toy_token(prefix_hash, len(tokens), sampling, mask))
            prefix_hash = extend_hash(prefix_hash, tokens[-1])
        return tokens

    return answer
