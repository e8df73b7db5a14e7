"""Tensors that have a shape and no content, in the place of a GPU's, so that kernels can be compiled without being run.

torch's FakeTensorMode does the same and more, but imports a compiler, which takes as long as all of torch, and some of
its versions refuse parameters of a class of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_DEVICE = torch.Tensor.device.__get__
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_WITHIN = ContextVar("within StandIns", default=False)


class StandIns(TorchFunctionMode):
    """Within, in this thread, tensors that are made on a device stand for those that would be made.

    They are tensors of torch's meta device that say they are on the GPU. What is computed of any of them is one, and
    nothing is computed; operations on none of them are carried out. The contents of other tensors never change by them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __enter__(self) -> StandIns:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._outside = _WITHIN.set(True)
        return self

    def __exit__(self, *exception: object) -> None:
        _WITHIN.reset(self._outside)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # A start looks at tensors' attributes some ten thousand times, so this is no place for torch's tree functions.
        are_stand_ins = [tensor.is_meta for tensor in _tensors((args, kwargs))]
        if any(are_stand_ins):
            if func == _DEVICE:
                return self._device
            if func == _IS_CUDA:
                return True
            if func.__name__.endswith("_") and not func.__name__.endswith("__"):
                return _without_content(args[0])  # of what changes contents
            if func in _SHAPES:
                shape, dtype = _SHAPES[func](*args)
                return torch.empty(shape, dtype=kwargs.get("dtype", dtype), device="meta")
            if not all(are_stand_ins):
                args, kwargs = tree_map_only(torch.Tensor, _without_content, (args, kwargs))
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == self._device.type:
            kwargs = kwargs | {"device": "meta"}
            func = _SHAPES_OF_VALUES.get(func, func)
        return func(*args, **kwargs)


def may_be_stand_ins() -> bool:
    """Whether this thread is within `StandIns`: outside, which is where it matters, tensors need not be looked at."""
    return _WITHIN.get()


def is_stand_in(argument: object) -> bool:
    """Whether it is a tensor without content."""
    return isinstance(argument, torch.Tensor) and argument.is_meta


def _tensors(argument: object) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for each in argument:
            yield from _tensors(each)
    elif isinstance(argument, dict):
        yield from _tensors(tuple(argument.values()))


def _without_content(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_SHAPES: dict[Callable[..., Any], Callable[..., tuple[Sequence[int], torch.dtype]]] = {
    functional.embedding: lambda ids, weight: ((*ids.shape, weight.shape[1]), weight.dtype),
    functional.linear: lambda x, weight, bias=None: ((*x.shape[:-1], weight.shape[0]), x.dtype),
    torch.empty_like: lambda tensor: (tensor.shape, tensor.dtype),
}
"""The results of operations for which torch's meta device would import sympy, which takes as long as all of torch."""
_SHAPES_OF_VALUES: dict[Callable[..., Any], Callable[..., Any]] = {torch.randn: torch.empty}
"""The same of those that make a tensor of a shape."""
