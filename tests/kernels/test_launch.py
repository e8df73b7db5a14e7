"""Compiling kernels ahead of their launches."""

from __future__ import annotations

import subprocess
import sys

KEYS = """
import sys
import torch
from paceline.kernels.launch import compile_only
from paceline.kernels.paged_decode_attention_hopper import _hopper_decode_kernel
from paceline.kernels.paged_prefill_attention_hopper import _hopper_prefill_kernel
from paceline.kernels.streamed_kernel import streamed_kernel

with compile_only(torch.device("cuda", 0), 1):
    kernels = [streamed_kernel, _hopper_decode_kernel, _hopper_prefill_kernel]
    for kernel in kernels if sys.argv[1] == "forwards" else reversed(kernels):
        kernel.cache_key
print([kernel.cache_key for kernel in kernels])
"""


def test_a_start_finds_what_another_compiled_in_another_order() -> None:
    """Triton's names of compiled kernels depend on the order in which they are first asked for."""
    forwards, backwards = (
        subprocess.run([sys.executable, "-c", KEYS, order], capture_output=True, text=True, check=True).stdout
        for order in ("forwards", "backwards")
    )
    assert forwards == backwards
