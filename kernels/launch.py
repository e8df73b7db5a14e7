"""Launching kernels, compiling them before that, and what launches need to know of the GPU."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

import paceline.kernels
from paceline.kernels.stand_ins import StandIns, is_stand_in, may_be_stand_ins


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, dependent: bool = False, **options: Any) -> None:
    """Start a Triton kernel on a grid of programs; within `compile_only`, compile it for such arguments instead.

    dependent: the kernel may start while the one before ends; `dependent_launch` says what that takes.
    """
    if dependent:  # not every backend knows the option
        options["launch_pdl"] = True
    if may_be_stand_ins() and any(is_stand_in(argument) for argument in arguments):
        seen = (_Pointer(argument) if is_stand_in(argument) else argument for argument in arguments)
        kernel.warmup(*seen, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


class _Pointer:
    """What Triton looks at in a tensor: a type, and an address that is as aligned as the tensor's will be."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        # Memory itself is aligned to more than counts.
        self._address = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def compile_only(device: torch.device, num_threads: int) -> Iterator[None]:
    """Within, tensors that are made on the device are stand-ins without content, and `launch` compiles for them.

    The kernels are compiled and loaded side by side; at the end the first error is raised.
    """
    compute_keys().result()
    with _Compilers(device, num_threads) as pool, triton.AsyncCompileMode(pool), StandIns(device):
        yield
    if pool.errors:
        raise pool.errors[0]


class _Compilers(ThreadPoolExecutor):
    """Threads that load each kernel that they compile: for that, some versions of Triton run a C compiler first."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        super().__init__(num_threads, initializer=torch.cuda.set_device, initargs=(device,))
        self.errors: list[Exception] = []
        """Of loading."""

    def submit(self, compile_kernel: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Called by Triton for each kernel that is not compiled yet."""
        return super().submit(self._load, functools.partial(compile_kernel, *arguments, **options))

    def _load(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        try:
            _ = kernel.run  # a property that loads the kernel
        except Exception as error:  # kept: Triton 3.6 never leaves its mode where one is raised here
            self.errors.append(error)
        return kernel


@functools.cache
def compute_keys() -> Future[None]:
    """Begin to compute, in a thread, what `compile_only` needs to find kernels in Triton's cache on disk.

    Triton reads all of itself for that, 400 MB, without Python's lock.
    """
    thread = ThreadPoolExecutor(1)
    keys = thread.submit(_compute_keys)
    thread.shutdown(wait=False)
    return keys


def _compute_keys() -> None:
    """Compute the names of all kernels in Triton's cache, in the same order in every process.

    In Triton 3.6 and 3.7 such a name depends on which of the functions that a kernel calls had theirs before: without
    this, starts that compile in another order than the first, which measures products, compile all of Gluon again.
    """
    triton_key()  # kept by Triton
    for module in sorted(module.name for module in pkgutil.iter_modules(paceline.kernels.__path__)):
        for value in vars(importlib.import_module(f"paceline.kernels.{module}")).values():
            if isinstance(value, JITFunction):
                _ = value.cache_key  # a property that computes it and keeps it


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; of a CPU, where kernels are interpreted, few."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take on a GPU; on a CPU all it wants."""
    if device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a GPU has what kernels for Hopper use, and later ones have not: wgmma."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start while the one before ends (programmatic dependent launch, from Hopper on).

    Such a kernel waits by itself, with gdc_wait, before it touches what earlier kernels wrote or still read. Every one
    of them must do so, even one that needs nothing from the kernel just before it: whoever comes next relies on it.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
