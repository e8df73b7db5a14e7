"""The gated activation of Llama-like MLPs: silu(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.launch import dependent_launch, launch

_BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [T, I], of gate_up, [T, 2 * I]: gate in the first half of the columns, up in the second.

    silu is computed in float32 and rounded to gate_up's dtype before the product. gate_up is contiguous.
    """
    return silu_and_mul_triton(gate_up) if gate_up.is_cuda else silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` in plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_and_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` by a Triton kernel."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    pdl = dependent_launch(gate_up.device)
    grid = (num_tokens, -(-size // _BLOCK))
    launch(_silu_and_mul_kernel, grid, gate_up, out, size, _BLOCK, pdl, num_warps=4, dependent=pdl)
    return out


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up_ptr + token * 2 * SIZE + columns, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * SIZE + SIZE + columns, mask=mask, other=0.0)
    gate32 = gate.to(tl.float32)
    activated = (gate32 * tl.sigmoid(gate32)).to(gate.dtype)
    tl.store(out_ptr + token * SIZE + columns, activated.to(tl.float32) * up.to(tl.float32), mask=mask)
