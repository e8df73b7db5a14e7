"""Root-mean-square normalisation (arXiv:1910.07467), whole on every rank."""

from __future__ import annotations

import torch
from torch import nn

from paceline.model.parameter import ShardedParameter


class RMSNorm(nn.Module):
    """The weight and the epsilon of a norm of the last dimension; whoever needs the normed values computes them."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = ShardedParameter.replicated((width,), dtype)
        self.eps = eps
