"""Scheduling policies: how a step's token budget is shared between prompts and running answers.

Whatever the policy, every request that is one token short (a running answer) gets this token in every step: beside a
prompt it costs next to nothing, and leaving it out would stall a reader. A policy says how much of the rest goes to
prompts, in order of priority and arrival.
"""

from __future__ import annotations

from typing import Protocol

from paceline.coordinator.errors import InputError


class Policy(Protocol):
    """Shares out the budget of one step."""

    def prompt_budget(self, budget: int, num_decodes: int) -> int:
        """Most tokens that requests with more than one token to compute may take together.

        budget: tokens of the step; num_decodes: requests with one token to compute, at most budget.
        """


class PromptsFirst:
    """Prompts take all that running answers leave: the shortest time to the first token."""

    def prompt_budget(self, budget: int, num_decodes: int) -> int:
        return budget - num_decodes


class DecodesFirst:
    """While answers run, prompts take at most a quarter of the budget: steps stay short, so the answers flow evenly.

    This is the stall-free batching of Sarathi-Serve (arXiv:2403.02310).
    """

    def prompt_budget(self, budget: int, num_decodes: int) -> int:
        if num_decodes == 0:
            return budget
        return min(budget - num_decodes, max(budget // 4, 1))


POLICIES: dict[str, Policy] = {"prompts-first": PromptsFirst(), "decodes-first": DecodesFirst()}


def policy_named(name: str) -> Policy:
    """The policy of this name; InputError lists the names there are."""
    policy = POLICIES.get(name)
    if policy is None:
        raise InputError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return policy
