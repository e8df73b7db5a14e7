"""Which tokens a row may sample, where it answers by a grammar: the plan's masks on a rank's shard of the logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from paceline.coordinator.errors import EngineError
from paceline.coordinator.messages import StepRows
from paceline.model.shard_plan import Span
from paceline.worker.upload import upload_ints


def mask_logits(logits: torch.Tensor, rows: StepRows, masks: Sequence[tuple[int, bytes]], vocab: Span) -> None:
    """Set what the masks (StepPlan.masks) forbid to minus infinity, in place, without waiting for the device.

    logits: [R, W] of the step's rows, whose columns are the ids of vocab and then padding, which is left as it is.
    """
    if vocab.length == 0:
        return
    # The words that hold any bit of this shard, and where its first bit lies in them.
    first, offset = divmod(vocab.start, 32)
    num_words = -(-(offset + vocab.length) // 32)
    words = array("i")
    for slot, mask in masks:
        mine = mask[first * 4 : (first + num_words) * 4]
        if len(mine) != num_words * 4:
            raise EngineError(f"the mask of slot {slot} has {len(mask)} bytes, too few for its rank's vocabulary")
        words.frombytes(mine)
    row_of = {slot: row for row, slot in enumerate(rows.slots)}
    index, packed = upload_ints([[row_of[slot] for slot, _ in masks], words], logits.device)
    # Bytes, as machines are little-endian: a byte a token is the least that can be had without a kernel of its own.
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (packed.view(len(masks), num_words).view(torch.uint8)[:, :, None] >> places) & 1
    forbidden = bits.flatten(1)[:, offset : offset + vocab.length] == 0
    mine_only = logits[:, : vocab.length]
    index = index.long()
    mine_only.index_copy_(0, index, mine_only.index_select(0, index).masked_fill_(forbidden, float("-inf")))
