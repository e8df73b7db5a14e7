"""Launching kernels, compiling them before that, and what launches need to know of the GPU."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITFunction

import paceline.kernels
from paceline.kernels.forked_work import forked
from paceline.kernels.stand_ins import StandIns, is_stand_in, may_be_stand_ins

_WORTH_FORKING = 3
"""Kernels; one or two are compiled sooner than processes begin."""


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
def compile_only(
    device: torch.device, num_processes: int, meanwhile: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Within, tensors that are made on the device are stand-ins without content, and `launch` compiles for them.

    Kernels that Triton's cache on disk has are loaded side by side. The others are compiled at the end, in the order of
    their launches, by so many processes, and loaded as they are ready. At last the first error is raised.
    meanwhile: is called once while other processes compile; where none do, it is not.
    """
    compute_keys().result()
    compilers = _Compilers(device, num_processes)
    with compilers.loaders, _Compilation(compilers):
        try:
            with StandIns(device):
                yield
            compilers.compile_missing(meanwhile)
        finally:
            compilers.give_up_missing()
    if compilers.errors:
        raise compilers.errors[0]


class _Compilation(triton.AsyncCompileMode):  # type: ignore[misc]
    """Finds out which kernels are compiled. It raises no errors: where it does, Triton 3.6 never leaves it."""

    def __init__(self, compilers: _Compilers) -> None:
        super().__init__(compilers, ignore_errors=True)
        self._compilers = compilers

    def submit(self, key: str, compile_kernel: Callable[[], Any], *others: Any) -> None:
        """Called by Triton for each kernel that this process has not loaded; key: all that it depends on.

        Triton is given nothing to launch until the kernel is loaded: Triton 3.7 would keep a kernel that never is.
        """
        if key not in self.future_kernels:  # most launches are of kernels that others have asked for
            self._compilers.next_is_compiled = _is_compiled(key)
        super().submit(key, compile_kernel, *others)


class _Compilers(Executor):
    """Threads that load kernels, and processes that compile those that the cache lacks.

    Compilers in threads of one interpreter mostly wait for each other. To load a kernel takes less of it: for that,
    some versions of Triton run a C compiler first.
    """

    def __init__(self, device: torch.device, num_processes: int) -> None:
        self.loaders = ThreadPoolExecutor(num_processes, initializer=torch.cuda.set_device, initargs=(device,))
        self.errors: list[BaseException] = []
        self.next_is_compiled = False
        self._num_processes = num_processes
        self._loading: list[Future[Any]] = []
        self._missing: dict[int, tuple[Future[Any], Callable[[], Any]]] = {}

    def submit(self, compile_kernel: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Called by Triton with what compiles a kernel, or takes it from the cache."""
        result: Future[Any] = Future()
        get_kernel = functools.partial(compile_kernel, *arguments, **options)
        if self.next_is_compiled:
            self._load(result, get_kernel)
        else:
            self._missing[len(self._missing)] = result, get_kernel
        return result

    def compile_missing(self, meanwhile: Callable[[], object]) -> None:
        """Have the processes compile what the cache lacks, and this one what is left or fails there."""
        pieces = [get_kernel for _, get_kernel in self._missing.values()]
        if self._num_processes > 1 and len(pieces) >= _WORTH_FORKING:
            wait(self._loading)  # loading threads hold locks
            with forked(pieces, min(self._num_processes, len(pieces))) as compiled:
                meanwhile()
                for index in compiled:
                    self._load(*self._missing.pop(index))
        while self._missing:
            self._load(*self._missing.pop(next(iter(self._missing))))

    def give_up_missing(self) -> None:
        """Triton waits for everything that it asked for."""
        for result, _ in self._missing.values():
            result.cancel()
            result.set_running_or_notify_cancel()

    def _load(self, result: Future[Any], get_kernel: Callable[[], Any]) -> None:
        loading = self.loaders.submit(_loaded, get_kernel)
        loading.add_done_callback(lambda done: self._end(result, done))
        self._loading.append(loading)

    def _end(self, result: Future[Any], loading: Future[Any]) -> None:
        error = loading.exception()
        if error is None:
            result.set_result(loading.result())
        else:
            self.errors.append(error)
            result.set_exception(error)


def _loaded(get_kernel: Callable[[], Any]) -> Any:
    kernel = get_kernel()
    _ = kernel.run  # a property that loads the kernel
    return kernel


def _is_compiled(key: str) -> bool:
    """Whether Triton's cache on disk has a kernel: a list of its files, `__grp__…`, is written last.

    A cache that is elsewhere has all, as far as is known here.
    """
    folder = getattr(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()), "cache_dir", None)
    return folder is None or any(name.startswith("__grp__") for name in os.listdir(folder))


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
