"""What a step leaves in the tables for the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.advance_rows import advance_rows_reference, advance_rows_triton


@pytest.mark.parametrize("advance", [advance_rows_reference, advance_rows_triton])
def test_rows_count_their_tokens_and_those_that_sample_get_one(
    advance: Callable[..., None], device: torch.device
) -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    token_table = torch.zeros(4, 6, dtype=torch.int32, device=device)
    computed, known = ints(0, 1, 2, 3), ints(1, 5, 3, 4)
    # Slot 2 samples, slot 1 runs two tokens of a longer prompt, slot 0 samples, and the last row is padding.
    advance(
        torch.tensor([70, 71, 72, 2**31 - 1], device=device),
        ints(2, 1, 0, -1),
        ints(0, 1, 3, 4, 4),
        ints(1, 0, 1, 0),
        token_table,
        computed,
        known,
    )
    assert computed.tolist() == [1, 3, 3, 3]
    assert known.tolist() == [2, 5, 4, 4]
    expected = torch.zeros(4, 6, dtype=torch.int32)
    expected[2, 3], expected[0, 1] = 70, 72
    assert torch.equal(token_table.cpu(), expected)
