"""Whether what was copied is finite, asked where it lies now: one small answer for many parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from paceline.model.parameter import Copy
from paceline.model.staging import PIECE_BYTES

_CHECKED_BYTES = 256 << 20
"""Of the source, looked at by one reduction; well within the 2 GiB that a GPU reaches by 32-bit offsets."""


def get_ready(device: torch.device, dtype: torch.dtype) -> None:
    """Have the driver load what not_finite runs on a GPU, which takes it longer than to look at a whole model.

    That is two tensors: the answers for several are put together and reduced, by kernels that one alone does without.
    """
    _are_finite([torch.zeros(2, dtype=dtype, device=device)] * 2)


def not_finite(copies: Sequence[Copy]) -> Iterator[Copy]:
    """The parts that hold a NaN or an infinity in the parameter, of copies that were carried out."""
    parts = [part for copy in copies for part in copy.pieces(_CHECKED_BYTES)]
    values = [part.destination for part in parts]
    if not parts or (values[0].is_cuda and _are_finite(values)):
        return
    for part, pair in zip(parts, _extremes(values), strict=True):
        if not all(map(math.isfinite, pair)):
            yield part


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all values of all of them are: one answer, which a GPU gives in a fraction of the calls for each."""
    return math.isfinite(torch.nn.utils.get_total_norm(tensors, math.inf).item())


def _extremes(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """The smallest and the largest of each: a value that is not finite shows in them, without a tensor of flags."""
    extremes = [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
    # All of them come in one transfer, since each is waited for.
    pairs: list[list[float]] = torch.stack(extremes).view(-1, 2).tolist()
    return pairs


def describe_not_finite(part: Copy) -> str:
    """Name the first value of a part that is not finite in the parameter, by its place in the full tensor.

    It is read from the file again. Raises CheckpointError where that cannot be done.
    """
    pieces = ((piece, piece.destination.isfinite()) for piece in part.pieces(PIECE_BYTES))
    piece, finite = next((piece, finite) for piece, finite in pieces if not finite.all())
    place = torch.unravel_index(finite.flatten().view(torch.uint8).argmin().cpu(), finite.shape)
    index = [box.start + int(number) for box, number in zip(piece.source, place, strict=True)]
    box = tuple(slice(number, number + 1) for number in index)
    value = piece.tensor.read(box, torch.empty(piece.tensor.dtype.itemsize, dtype=torch.uint8)).item()
    what = f"tensor {piece.tensor.name} in {piece.tensor.file_name} holds {value:g} at {index}"
    if math.isfinite(value):
        return f"{what}, beyond {str(piece.parameter.dtype).removeprefix('torch.')}; choose another dtype"
    return what
