"""What launches need to know of the GPU."""

from __future__ import annotations

import functools

import torch


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


def launch_options(dependent: bool) -> dict[str, bool]:
    """What a launch is given to be a dependent one; nothing otherwise, for not every backend knows the option."""
    return {"launch_pdl": True} if dependent else {}
