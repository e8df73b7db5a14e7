"""Compiling kernels ahead of their launches."""

from __future__ import annotations

import os
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


UNLOADABLE = """
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from paceline.kernels.launch import compile_only
from paceline.kernels.silu_and_mul import silu_and_mul

def load_binary(*arguments):
    raise RuntimeError("no room")

class Hopper:
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 1 << 17}, load_binary=load_binary)
    launcher_cls = get_current_device = get_current_stream = lambda *arguments: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver.set_active(Hopper())
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_capability = lambda device=None: (9, 0)
for width in (512, 2048):
    try:
        with compile_only(torch.device("cuda", 0), 2):
            silu_and_mul(torch.empty((4, width), dtype=torch.bfloat16, device="cuda"))
    except RuntimeError as error:
        print(error)
"""


def test_a_kernel_that_cannot_be_loaded_is_an_error_each_time() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", UNLOADABLE], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "no room\nno room\n"), run.stderr
