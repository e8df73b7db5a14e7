"""Python's garbage collector beside an engine, whose objects live as long as it does."""

from __future__ import annotations

import gc

import torch


def keep_all_that_is_here(device: torch.device) -> None:
    """Have the collector not look again through what is alive now, until `gc.unfreeze`.

    Otherwise it goes through some hundred thousand objects of torch, the tokenizer and the model in the middle of a
    step now and then, and every running answer stands still for 0.16 s and more.
    """
    if device.type == "cuda":
        gc.collect()  # what is garbage by now may hold memory of the GPU, and is not kept
    gc.freeze()
