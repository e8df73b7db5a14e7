"""What launches need to know of the GPU."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; of a CPU, where kernels are interpreted, few."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start while the one before ends (programmatic dependent launch, from Hopper on).

    Such a kernel waits by itself, with gdc_wait, before it touches what earlier kernels wrote or still read. Every one
    of them must do so, even one that needs nothing from the kernel just before it: whoever comes next relies on it.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch_lines(pointers: tl.tensor) -> None:
    """Have the lines of memory at pointers, which must be valid, brought into the L2 cache; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
