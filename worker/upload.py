"""Moving small lists of a step plan to the device without waiting for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch


def upload_ints(sequences: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Copy integer sequences to the device as int32 tensors, all in one transfer."""
    flat = array("i")
    for sequence in sequences:
        flat.extend(sequence)
    return list(to_device(flat, device).split([len(sequence) for sequence in sequences]))


def to_device(words: array[int], device: torch.device) -> torch.Tensor:
    """Copy 32-bit integers to the device, [N] int32; they are not to be changed any more.

    On a GPU the transfer starts from pinned memory, so that the host does not wait for the work queued before it.
    """
    if not words:
        return torch.empty(0, dtype=torch.int32, device=device)
    packed = torch.frombuffer(words, dtype=torch.int32)
    return packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed


def float_bits(values: Sequence[float]) -> array[int]:
    """Float32 values as integers of the same bits, to be uploaded; on the device, view the tensor as float32."""
    return array("i", array("f", values).tobytes())


def long_bits(value: int) -> array[int]:
    """A signed 64-bit integer as two integers of the same bits, to be uploaded."""
    return array("i", array("q", [value]).tobytes())
