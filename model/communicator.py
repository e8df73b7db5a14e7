"""How the shards of one model exchange tensors.

A layer is given its communicator; nothing is looked up globally. The same layer code runs alone, over
torch.distributed (NCCL or gloo), and as threads of one process that stand for ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from paceline.kernels.stand_ins import is_stand_in
from paceline.model.errors import CollectiveError

T = TypeVar("T")

LOOK_EVERY = timedelta(seconds=1)
"""How often a rank that waits in a collective of gloo looks whether the others are there."""

# torch 2.13 renamed it, and warns of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator(Protocol):
    """Collectives over the ranks of one tensor-parallel group. Every rank calls the same ones in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, the same bits on each; may reuse the argument's memory."""

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks; may reuse the argument's memory."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' equally shaped tensors along the last dimension, in rank order."""


class SingleRank:
    """The group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class ProcessGroupCommunicator:
    """Ranks are processes of a torch.distributed group.

    What stands in for a tensor while kernels are compiled is not exchanged. A collective that fails is a
    CollectiveError.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self._is_gloo = dist.get_backend(group) == "gloo"
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.check_others: Callable[[], None] = lambda: None
        """Raises where another rank is gone; asked while a collective of gloo does not end."""
        self._work: dist.Work | None = None
        """Of gloo, while it runs."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._run(dist.all_reduce, tensor)
        return tensor

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        self._run(dist.all_reduce, tensor, op=dist.ReduceOp.MAX)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        # NCCL and gloo concatenate along the first dimension; ranks are brought to the last one here.
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._run(_all_gather_single, gathered.view(-1), tensor.view(-1))
        return gathered.movedim(0, -2).reshape(*tensor.shape[:-1], -1)

    def close(self) -> None:
        """Destroy the group, which ends its threads while the interpreter still runs.

        gloo's threads release tensors, for which they need the interpreter: ended only with the process, they may meet
        it half torn down and abort.
        """
        if self._work is not None and not self._work.is_completed():
            # A collective was left in the middle. To destroy the group would be to wait for that, at the interpreter's
            # end, too: so it is held for ever, and ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            return
        self._group = None
        dist.destroy_process_group()

    def _run(self, collective: Callable[..., dist.Work | None], *tensors: torch.Tensor, **options: object) -> None:
        if is_stand_in(tensors[0]):
            return
        with _collective_errors():
            self._work = collective(*tensors, group=self._group, async_op=self._is_gloo, **options)
        if self._work is not None:
            self._wait(self._work)

    def _wait(self, work: dist.Work) -> None:
        """Wait for gloo, which may miss that a rank has died: about one death in 300 leaves a send waiting until the
        group's timeout, and signals are not handled meanwhile."""
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # it has not ended yet, or with an error that is raised below
                work.wait(LOOK_EVERY)
            if not work.is_completed():
                self.check_others()
        self._work = None
        with _collective_errors():
            work.wait()


@contextlib.contextmanager
def _collective_errors() -> Iterator[None]:
    """What torch.distributed raises, as a CollectiveError."""
    try:
        yield
    except RuntimeError as error:
        # Of "[…/pair.cc:537] Read error …: Connection reset by peer. This is typically …" what has happened.
        words = re.sub(r"^\[[^\]]*\]\s*", "", " ".join(str(error).split())).partition(". ")[0]
        raise CollectiveError(f"a collective with the other ranks failed ({words})") from error


class _ThreadRank:
    """One thread's end of a simulated group."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[torch.Tensor | None]) -> None:
        self.rank = rank
        self.size = len(board)
        self._barrier = barrier
        self._board = board

    def _exchange(self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        self._board[self.rank] = tensor
        self._barrier.wait()
        parts = [part for part in self._board if part is not None]
        if any((part.dtype, part.shape) != (tensor.dtype, tensor.shape) for part in parts):
            # Real ranks would abort, wait for ever, or read each other's bits as what they are not.
            raise CollectiveError(f"ranks meet with {[(part.dtype, tuple(part.shape)) for part in parts]}")
        result = combine(parts)
        self._barrier.wait()  # nobody may overwrite the board, or the tensor on it, before all have read
        return result

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor, lambda parts: torch.stack(parts).sum(0))

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor, lambda parts: torch.stack(parts).amax(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor, lambda parts: torch.cat(parts, dim=-1))


def run_simulated_ranks(size: int, body: Callable[[Communicator], T]) -> list[T]:
    """Run body once a rank, in threads of this process that meet at every collective; results in rank order.

    The first exception of any rank is raised here, and the other ranks end too.
    """
    barrier = threading.Barrier(size)
    board: list[torch.Tensor | None] = [None] * size

    def guarded(rank: int) -> T:
        try:
            return body(_ThreadRank(rank, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
