"""Random weights without files: each element is a function of (seed, tensor name, row, column).

So a rank makes just its slice, on its own device, and any number of ranks has the same model.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.model.parameter import Box


@dataclass(frozen=True)
class DummyTensor:
    """A tensor of random values that is read in parts like one in a file.

    Matrices are uniform with variance 1 / columns, so that activations keep their size from layer to layer; norm
    weights lie within 0.1 of 1, biases within 0.1 of 0.
    """

    name: str
    shape: tuple[int, ...]
    """Of one or two dimensions."""
    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    file_name: ClassVar[str] = "no file"

    def read(self, box: Box, buffer: torch.Tensor) -> torch.Tensor:
        """The values of one box, on the device; the buffer is not used."""
        rows, columns = box if len(box) == 2 else (slice(0, 1), box[0])
        values = self._values(rows.start, rows.stop - rows.start, columns.start, columns.stop - columns.start)
        return values.view([part.stop - part.start for part in box]).to(self.dtype)

    def _values(self, first_row: int, rows: int, first_column: int, columns: int) -> torch.Tensor:
        """[rows, columns] float32."""
        uniform = self._hashes(first_row, rows, first_column, columns).to(torch.float32).mul_(2.0**-31)
        if len(self.shape) == 2:
            return uniform.mul_(math.sqrt(3 / self.shape[1]))
        return uniform.mul_(0.1).add_(1.0 if self.name.endswith("norm.weight") else 0.0)

    def _hashes(self, first_row: int, rows: int, first_column: int, columns: int) -> torch.Tensor:
        """[rows, columns] int32, uniform over all 32 bits."""
        digest = hashlib.blake2s(f"{self.seed}/{self.name}".encode(), digest_size=8).digest()
        row_key, column_key = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))

        def count(first: int, number: int) -> torch.Tensor:
            return torch.arange(first, first + number, dtype=torch.int32, device=self.device)

        row_hashes = _mix(count(first_row, rows).bitwise_xor_(row_key))
        column_hashes = _mix(count(first_column, columns).bitwise_xor_(column_key))
        return _mix(row_hashes.unsqueeze(1) + column_hashes)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int32 in place: lowbias32 of https://github.com/skeeto/hash-prospector."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x.bitwise_xor_(_shift_right(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shift_right(x, 16))


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own repeats the sign of an int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
