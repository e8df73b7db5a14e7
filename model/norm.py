"""Root-mean-square normalisation (arXiv:1910.07467), whole on every rank."""

from __future__ import annotations

import torch
from torch import nn

from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.model.parameter import ShardedParameter


class RMSNorm(nn.Module):
    """Normalises the last dimension and scales it by the weight."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = ShardedParameter.replicated((width,), dtype)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same shape."""
        return rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); no residual counts as zero."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self._eps)
