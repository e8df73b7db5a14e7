"""A short forward pass in float32, to compare a model cut over ranks with the same model on one."""

from __future__ import annotations

import torch

from paceline.model.communicator import Communicator
from paceline.model.context import KVCache, StepContext
from paceline.model.decoder import CausalLM
from paceline.model.shard_plan import ShardPlan
from paceline.model.verify_shards import Difference

PROMPT_TOKENS = 24
MAX_MODEL_LEN = PROMPT_TOKENS + 1
TOLERANCE = 5e-5
"""Largest difference of two logits, as a share of the largest logit: float32 sums over ranks are rounded otherwise."""

_BLOCK_SIZE = 16
_BLOCKS = -(-MAX_MODEL_LEN // _BLOCK_SIZE)


def probe_logits(model: CausalLM, comm: Communicator, device: torch.device) -> torch.Tensor:
    """[MAX_MODEL_LEN, vocab_size] float32 on the CPU: a prompt of fixed tokens at once, then one more by itself.

    The model's parameters are float32. All ranks call this.
    """
    config = model.config
    ids = torch.randint(config.vocab_size, (MAX_MODEL_LEN,), generator=torch.Generator().manual_seed(0))
    ids[:2] = torch.tensor([0, config.vocab_size - 1])
    ids = ids.to(device)
    heads = ShardPlan(config, comm.size).kv_heads(comm.rank).padded
    shape = (_BLOCKS, _BLOCK_SIZE, heads, config.head_dim)
    caches = [
        (torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in range(config.num_hidden_layers)
    ]
    logits = []
    with torch.inference_mode():
        for start, stop in ((0, PROMPT_TOKENS), (PROMPT_TOKENS, MAX_MODEL_LEN)):
            context = _context(start, stop, caches, device)
            local = model.logits(*model(ids[start:stop], context))
            logits.append(comm.all_gather(local)[:, : config.vocab_size].cpu())
    return torch.cat(logits)


def compare_logits(sharded: torch.Tensor, unsharded: torch.Tensor) -> tuple[float, Difference | None]:
    """The largest difference as a share of the largest logit, and where it is if it is above TOLERANCE."""
    largest = unsharded.abs().amax().item()
    differences = (sharded - unsharded).abs()
    # NaN is a difference too, and the largest.
    flat = differences.nan_to_num(torch.inf).flatten().argmax()
    index = tuple(int(number) for number in torch.unravel_index(flat, sharded.shape))
    error = differences[index].item() / largest
    if error <= TOLERANCE:
        return error, None
    return error, Difference("forward", "logits", 0, index, sharded[index].item(), unsharded[index].item())


def _context(start: int, stop: int, caches: list[KVCache], device: torch.device) -> StepContext:
    """One row that runs its tokens from start to stop, over blocks in order."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StepContext(
        positions=ints(*range(start, stop)),
        slot_mapping=ints(*range(start, stop)).long(),
        query_start=ints(0, stop - start),
        seq_lens=ints(stop),
        block_tables=ints(*range(_BLOCKS)).unsqueeze(0),
        row_slots=ints(0),
        logits_tokens=None,
        kv_caches=caches,
    )
