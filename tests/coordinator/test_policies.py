"""How the named policies share out a step's budget."""

from __future__ import annotations

import pytest

from paceline.coordinator.errors import InputError
from paceline.coordinator.policies import policy_named


@pytest.mark.parametrize(
    ("name", "budget", "num_decodes", "expected"),
    [
        ("prompts-first", 64, 0, 64),
        ("prompts-first", 64, 10, 54),
        ("prompts-first", 64, 64, 0),
        ("decodes-first", 64, 0, 64),
        ("decodes-first", 64, 10, 16),
        ("decodes-first", 64, 60, 4),
        ("decodes-first", 64, 64, 0),
        ("decodes-first", 2, 1, 1),
    ],
)
def test_tokens_for_prompts(name, budget, num_decodes, expected):
    assert policy_named(name).prompt_budget(budget, num_decodes) == expected


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match="prompts-first, decodes-first, got 'fcfs'"):
        policy_named("fcfs")
