"""Store runs of values at many places of one piece of memory, by one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.launch import launch

_BLOCK = 1024


def store_runs(memory: torch.Tensor, packed: torch.Tensor, num_runs: int, longest: int) -> None:
    """Store num_runs runs of consecutive values, the longest of `longest`, in memory; no two may overlap.

    memory: [M] int32, contiguous. packed: int32, contiguous: of each run its place in memory, an int64 in two halves;
    where its values begin, and past the last run where they all end; then the values of all runs.
    """
    if num_runs > 0:
        (store_runs_triton if memory.is_cuda else store_runs_reference)(memory, packed, num_runs, longest)


def store_runs_reference(memory: torch.Tensor, packed: torch.Tensor, num_runs: int, longest: int) -> None:
    """`store_runs` in plain PyTorch."""
    places = packed[: 2 * num_runs].view(torch.int64).tolist()
    starts = packed[2 * num_runs : 3 * num_runs + 1].tolist()
    values = packed[3 * num_runs + 1 :]
    for place, start, end in zip(places, starts, starts[1:], strict=False):
        memory[place : place + end - start] = values[start:end]


def store_runs_triton(memory: torch.Tensor, packed: torch.Tensor, num_runs: int, longest: int) -> None:
    """`store_runs` by a Triton kernel."""
    grid = num_runs, triton.cdiv(longest, _BLOCK)
    launch(_store_runs_kernel, grid, memory, packed, num_runs, _BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["num_runs"])
def _store_runs_kernel(memory_ptr: tl.tensor, packed_ptr: tl.tensor, num_runs: tl.tensor, BLOCK: tl.constexpr) -> None:
    """BLOCK values of one run."""
    run = tl.program_id(0)
    starts_ptr = packed_ptr + 2 * num_runs + run
    start, end = tl.load(starts_ptr), tl.load(starts_ptr + 1)
    index = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < end
    place = tl.load(packed_ptr.to(tl.pointer_type(tl.int64)) + run)
    values = tl.load(packed_ptr + 3 * num_runs + 1 + index, mask=mask)
    tl.store(memory_ptr + place + (index - start), values, mask=mask)
