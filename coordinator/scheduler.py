"""Decides what each step computes.

There are no phases. A request has so many known tokens and so many computed ones, and a step gives it some of the
difference. Prefill, chunked prefill, decode, prefix hits and resuming after preemption are that one rule.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.coordinator.block_manager import BlockManager
from paceline.coordinator.messages import Admission, StepPlan, StepRows
from paceline.coordinator.policies import Policy
from paceline.coordinator.prefix_cache import PrefixMatch
from paceline.coordinator.request import Request, Status
from paceline.coordinator.view import StepLine


@dataclass(slots=True)
class ScheduledStep:
    """A plan, the requests that the result's tokens belong to, in order, and what is remembered of the step."""

    plan: StepPlan
    sampled: Sequence[Request]
    line: StepLine
    scored: Sequence[tuple[Request, int, int]] = ()
    """Whose prompts the result has log-probabilities of: (request, how many came before, how many these are)."""


@dataclass(slots=True)
class _Draft:
    """A plan in the making. Rows are (request, tokens to compute)."""

    prompt_budget: int
    decodes: list[Request] = field(default_factory=list)
    """Rows of one token."""
    prompts: list[tuple[Request, int]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    block_appends: list[tuple[int, Sequence[int]]] = field(default_factory=list)


class Scheduler:
    """Holds the requests that wait and those that run, both in order of rank, and plans steps for them.

    A request is admitted only with the blocks of all its known tokens, so prompts never stall half-way; a running
    answer that needs one more block preempts the request of the highest rank, if need be itself. So the request of
    the lowest rank among those that run always goes on, and alone it always fits: the door lets in no other.
    """

    def __init__(self, blocks: BlockManager, policy: Policy, *, max_running: int, token_budget: int) -> None:
        """token_budget: most tokens of a step; max_running: slots the ranks have."""
        self.blocks = blocks
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        """Prompt tokens of all requests admitted so far, each request counted once."""
        self.cached_prompt_tokens = 0
        """How many of these were found in the prefix cache."""
        self._policy = policy
        self._token_budget = token_budget
        self._num_slots = max_running
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._unpublished: list[Request] = []
        self._last_rows: StepRows | None = None

    def add(self, request: Request) -> None:
        """Queue a new request."""
        insort(self.waiting, request, key=_rank)

    def finish(self, request: Request) -> None:
        """Take out a request for good, and take back what it holds.

        A step in flight may still write to its slot and blocks. That does no harm: ranks run plans in order, so
        whatever reuses them comes later.
        """
        if request.status is Status.RUNNING:
            self._vacate(request)
            _remove(self.running, request)
        else:
            _remove(self.waiting, request)
        request.status = Status.FINISHED

    def schedule(self, now: float) -> ScheduledStep | None:
        """Plan the next step; None where no request can take a token. now: stamps first admissions and the step."""
        self.blocks.begin_plan()
        pending = [request.num_pending for request in self.running]
        # More than the budget has tokens there are only where grammars held some of them back for a step.
        num_decodes = min(pending.count(1), self._token_budget)
        draft = _Draft(self._policy.prompt_budget(self._token_budget, num_decodes))
        self._continue_running(draft, pending)
        self._admit_waiting(draft, now)
        if not draft.decodes and not draft.prompts:
            return None
        return self._finish_draft(draft, now)

    def publish_planned(self) -> None:
        """Make findable what the plan made last computes of prompts: behind its submission, for the device waits."""
        for request in self._unpublished:
            self.blocks.publish(request.table, request.token_ids, request.num_computed)
        self._unpublished.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError where the bookkeeping contradicts itself; costs O(blocks), for tests."""
        self.blocks.check_invariants(request.table for request in (*self.running, *self.waiting))
        for requests, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            if requests != sorted(requests, key=_rank) or any(request.status is not status for request in requests):
                raise AssertionError(f"the requests that are {status.name} are out of order or not so")
        slots = [*self._free_slots, *(request.slot for request in self.running)]
        if sorted(slots) != list(range(self._num_slots)):
            raise AssertionError("a slot is lost, or given twice")
        for request in self.running:
            held = len(request.table.block_ids) * self.blocks.block_size
            if not request.num_computed <= min(held, request.num_known):
                raise AssertionError(f"request {request.id} computes {request.num_computed} tokens in {held} places")
        if any(request.table.block_ids or request.num_computed for request in self.waiting):
            raise AssertionError("a waiting request holds blocks")

    def _continue_running(self, draft: _Draft, pending_of_each: Sequence[int]) -> None:
        """Give running requests their tokens, lowest rank first, so that a victim never has a row in the draft."""
        for index, pending in enumerate(pending_of_each):
            if index >= len(self.running):  # the others were preempted
                return
            request = self.running[index]
            if pending == 1:
                if len(draft.decodes) < self._token_budget and self._make_room(request, draft):
                    request.num_computed += 1
                    draft.decodes.append(request)
            elif pending > 1 and draft.prompt_budget > 0:
                self._add_prompt_row(request, pending, draft)

    def _make_room(self, request: Request, draft: _Draft) -> bool:
        """See that a request has a block for one more token; False where it had to be preempted itself."""
        if request.num_computed < len(request.table.block_ids) * self.blocks.block_size:
            return True
        while self.blocks.available == 0:
            if self._preempt_last() is request:
                return False
        draft.block_appends.append((request.slot, (self.blocks.append(request.table),)))
        return True

    def _preempt_last(self) -> Request:
        """Send the running request of the highest rank back to wait.

        Its tokens stay, and its blocks can be found until they are reused.
        """
        victim = self.running.pop()
        self._vacate(victim)
        insort(self.waiting, victim, key=_rank)
        victim.status = Status.WAITING
        victim.num_computed = 0
        self.num_preemptions += 1
        return victim

    def _vacate(self, request: Request) -> None:
        self.blocks.release(request.table)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1

    def _admit_waiting(self, draft: _Draft, now: float) -> None:
        """Admit requests in order of rank until budget, slots or blocks run out; nobody overtakes."""
        while self.waiting and self._free_slots and draft.prompt_budget > 0:
            request = self.waiting[0]
            if request.awaits_tokens:
                return  # preempted with a sampled token still on its way; its history is not complete yet
            match = self.blocks.match_prefix(request.table, request.token_ids, use=not request.wants_scores)
            # A block that this plan computes can be shared from the next plan on: waiting beats computing it twice.
            if match.next_is_coming or not self._fits(request, match):
                return
            del self.waiting[0]
            self._admit(request, match, draft, now)

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        # One block stays in reserve for each running request, or the newcomer would soon be preempted.
        return self.blocks.cost(match, request.num_known) + len(self.running) <= self.blocks.available

    def _admit(self, request: Request, match: PrefixMatch, draft: _Draft, now: float) -> None:
        request.slot = request.table.slot = self._free_slots.pop()
        self.blocks.allocate(request.table, match, request.num_known)
        request.status = Status.RUNNING
        request.num_computed = len(match.block_ids) * self.blocks.block_size
        request.is_scored = request.wants_scores
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.cached_tokens = request.num_computed
            self.prompt_tokens += request.prompt_len
            self.cached_prompt_tokens += request.num_computed
        insort(self.running, request, key=_rank)
        sampling = request.sampling
        if sampling.prompt_logprobs >= 0 and not request.is_scored:  # its prompt was scored before it lost its slot
            sampling = replace(sampling, prompt_logprobs=-1)
        draft.admissions.append(
            Admission(
                slot=request.slot,
                token_ids=request.token_ids[:],
                prompt_len=request.prompt_len,
                num_computed=request.num_computed,
                block_ids=tuple(request.table.block_ids),
                sampling=sampling,
            )
        )
        self._add_prompt_row(request, request.num_pending, draft)

    def _add_prompt_row(self, request: Request, pending: int, draft: _Draft) -> None:
        count = min(pending, draft.prompt_budget)
        draft.prompt_budget -= count
        draft.prompts.append((request, count))
        request.num_computed += count
        self.blocks.announce(request.table, request.token_ids, request.num_computed)
        self._unpublished.append(request)

    def _finish_draft(self, draft: _Draft, now: float) -> ScheduledStep:
        ones = [request for request, count in draft.prompts if count == 1]
        longer = [(request, count) for request, count in draft.prompts if count > 1]
        in_order = [*draft.decodes, *ones, *(request for request, _ in longer)]
        samples = [request.num_computed == request.num_known for request in in_order]
        rows = StepRows(
            slots=[request.slot for request in in_order],
            counts=[1] * (len(draft.decodes) + len(ones)) + [count for _, count in longer],
            samples=samples,
        )
        sampled = [request for request, sample in zip(in_order, samples, strict=True) if sample]
        for request in sampled:
            request.num_known += 1
        plan = StepPlan(
            step=self.num_steps,
            freed=self._freed_slots,
            admissions=draft.admissions,
            block_appends=draft.block_appends,
            rows=None if rows == self._last_rows else rows,
            masks=[(request.slot, request.constraint.mask) for request in sampled if request.constraint is not None],
        )
        prompt_tokens = sum(count for _, count in draft.prompts)
        line = StepLine(self.num_steps, now, len(in_order), prompt_tokens, len(draft.decodes))
        self.num_steps += 1
        self._last_rows = rows
        self._freed_slots = []
        return ScheduledStep(plan, sampled, line, _count_scores(in_order, rows.counts))


def _count_scores(requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[Request, int, int]]:
    """ScheduledStep.scored of a step's rows: each computed token tells how likely the one after it was."""
    scored = []
    for request, count in zip(requests, counts, strict=True):
        if request.is_scored:
            first = request.num_computed - count
            number = min(request.num_computed, request.prompt_len - 1) - first
            scored.append((request, first, number))
            request.num_scored = max(request.num_scored, first + number)
            request.is_scored = request.wants_scores
    return scored


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _remove(ordered: list[Request], request: Request) -> None:
    del ordered[bisect_left(ordered, request.rank, key=_rank)]
