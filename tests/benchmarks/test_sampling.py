"""The sampling benchmark's own filter is right, and its checks find what is wrong."""

from __future__ import annotations

import pytest
import sampling
import torch

from paceline.kernels.top_k_top_p import find_cutoffs_reference


def rules(rows: int, top_k: int, top_p: float, min_p: float) -> sampling.Rules:
    return (
        torch.full((rows,), 0.7),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def kept_by_reference(logits: torch.Tensor, rules: sampling.Rules) -> torch.Tensor:
    everyone = torch.arange(logits.shape[0])
    return logits >= find_cutoffs_reference(logits, everyone, *rules)[:, None]


@pytest.mark.parametrize("digits", [3, 0])
@pytest.mark.parametrize("rule", [*sampling.RULES.values(), (0, 1.0, 0.3), (2000, 0.5, 0.0)])
def test_the_sorting_filter_keeps_what_the_reference_keeps(rule: tuple[int, float, float], digits: int) -> None:
    """Also where many logits are equal, as they are when rounded."""
    torch.manual_seed(0)
    logits = (2 * torch.randn(5, 1000)).round(decimals=digits)
    kept = kept_by_reference(logits, rules(5, *rule))
    filtered = sampling.filter_by_sorting(logits.clone(), *rules(5, *rule))
    assert torch.equal(filtered, logits.masked_fill(~kept, float("-inf")))


def test_a_filter_that_keeps_too_much_or_too_little_is_found() -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(5, 1000)
    rule = rules(5, 50, 1.0, 0.0)
    kept = kept_by_reference(logits, rule)
    assert sampling.misplaced_mass(kept, logits, rule) == 0
    probabilities = (logits / 0.7).softmax(-1)
    dropped = probabilities.masked_fill(kept, 0).sum(-1).max()
    assert sampling.misplaced_mass(torch.ones_like(kept), logits, rule) == pytest.approx(float(dropped), rel=1e-4)
    kept[3, probabilities[3].argmax()] = False
    assert sampling.misplaced_mass(kept, logits, rule) == pytest.approx(float(probabilities[3].max()), rel=1e-4)


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
