"""The sampling benchmark's own filter is right, and its checks find what is wrong."""

from __future__ import annotations

import math

import pytest
import sampling
import torch

from paceline.kernels.top_k_top_p import filter_logits_reference


def rules(rows: int, top_k: int, top_p: float, min_p: float) -> sampling.Rules:
    return (
        torch.full((rows,), 0.7),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


@pytest.mark.parametrize("rule", [*sampling.RULES.values(), (0, 1.0, 0.3), (2000, 0.5, 0.0)])
def test_the_sorting_filter_keeps_what_the_reference_keeps(rule: tuple[int, float, float]) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(5, 1000)
    expected = filter_logits_reference(logits.clone(), *rules(5, *rule))
    assert torch.equal(sampling.filter_by_sorting(logits.clone(), *rules(5, *rule)), expected)


def test_a_filter_that_keeps_too_much_or_changes_a_logit_is_found() -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(5, 1000)
    rule = rules(5, 50, 1.0, 0.0)
    right = filter_logits_reference(logits.clone(), *rule)
    assert sampling.misplaced_mass(right, logits, rule) == 0
    expected = (logits / 0.7).softmax(-1).masked_fill(right != -math.inf, 0).sum(-1).max()
    assert sampling.misplaced_mass(logits.clone(), logits, rule) == pytest.approx(float(expected), rel=1e-4)
    right[3, right[3].argmax()] += 1e-3
    assert math.isnan(sampling.misplaced_mass(right, logits, rule))


def test_a_choice_below_the_best_is_found() -> None:
    torch.manual_seed(0)
    logits, temperature = torch.randn(3, 1000), torch.tensor([0.0, 1.0, 0.5])
    seeds, positions = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6], dtype=torch.int32)
    chosen = sampling.Choice(3, logits.device)(
        logits, temperature, seeds, positions, torch.arange(3, dtype=torch.int32)
    )
    assert sampling.shortfall(chosen, logits, temperature, seeds, positions) < 1e-4
    chosen[0] = logits[0].argsort()[-2]
    assert sampling.shortfall(chosen, logits, temperature, seeds, positions) == pytest.approx(
        float(logits[0].sort().values[-1] - logits[0].sort().values[-2])
    )
