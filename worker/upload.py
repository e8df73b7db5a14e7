"""Moving small lists of a step plan to the device without waiting for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch


def upload_ints(sequences: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Copy integer sequences to the device as int32 tensors, all in one transfer.

    On a GPU the transfer starts from pinned memory, so that the host does not wait for the work queued before it.
    """
    flat = array("i")
    for sequence in sequences:
        flat.extend(sequence)
    if not flat:
        return [torch.empty(0, dtype=torch.int32, device=device) for _ in sequences]
    packed = torch.frombuffer(flat, dtype=torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return list(packed.split([len(sequence) for sequence in sequences]))


def float_bits(values: Sequence[float]) -> array[int]:
    """Float32 values as integers of the same bits, for upload_ints; on the device, view the tensor as float32."""
    return array("i", array("f", values).tobytes())


def long_bits(value: int) -> array[int]:
    """A signed 64-bit integer as two integers of the same bits, for upload_ints."""
    return array("i", array("q", [value]).tobytes())
