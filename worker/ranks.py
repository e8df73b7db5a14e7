"""Joining the ranks that torchrun started, and the few values they exchange while the engine starts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import EngineError, InputError
from paceline.model.communicator import Communicator, ProcessGroupCommunicator, SingleRank
from paceline.model.errors import LoadingStopped
from paceline.model.shard_reader import StopFlag

START_TIMEOUT = timedelta(hours=2)
"""A rank may wait this long for another that loads a large model; a dead one is noticed by torchrun at once."""
COLLECTIVE_TIMEOUT = timedelta(minutes=2)
"""A rank that stands still ends the others after this long."""
STOP_POLL_S = 0.25


class RankGroup:
    """This process's place among the ranks: its device, its communicator, and a small exchange of texts.

    A group of one touches no network and no torch.distributed.
    """

    def __init__(self, config: EngineConfig, environment: Mapping[str, str] | None = None) -> None:
        """Join the group that the environment describes (torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*).

        Raises InputError where it does not match config: another number of ranks, or too few GPUs.
        """
        environment = os.environ if environment is None else environment
        self.rank = int(environment.get("RANK", "0"))
        self.size = int(environment.get("WORLD_SIZE", "1"))
        self.local_rank = int(environment.get("LOCAL_RANK", "0"))
        check_world_size(config.tensor_parallel_size, self.size)
        if int(environment.get("LOCAL_WORLD_SIZE", str(self.size))) != self.size:
            raise InputError("ranks on several hosts are not supported yet; start all ranks with one torchrun")
        self.device = choose_device(config.device, self.local_rank, self.size)
        self._store: dist.Store | None = None
        self._exchanges = 0
        self.communicator: Communicator = SingleRank()
        if self.size > 1:
            self.communicator = self._connect()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def device_name(self) -> str:
        """What this rank runs on, for people."""
        if self.device.type == "cuda":
            return f"{self.device} · {torch.cuda.get_device_name(self.device)}"
        return f"cpu · threads: {torch.get_num_threads()}"

    def _connect(self) -> Communicator:
        on_gpu = self.device.type == "cuda"
        self._store, _, _ = next(iter(dist.rendezvous("env://", self.rank, self.size, timeout=START_TIMEOUT)))
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("collectives", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.device if on_gpu else None,
        )
        group = dist.group.WORLD
        if group is None:
            raise EngineError("torch.distributed gave no process group after initialisation")
        return ProcessGroupCommunicator(group)

    def exchange(self, value: str) -> list[str]:
        """Every rank's value in rank order. All ranks call this the same number of times; only for starting up.

        Any text arrives as it is, half characters too: names in files and paths that are no UTF-8 hold some. The store
        takes none, so they travel as JSON, which escapes them.
        """
        if self._store is None:
            return [value]
        self._exchanges += 1
        prefix = f"paceline/{self._exchanges}"
        self._store.set(f"{prefix}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{prefix}/{rank}")) for rank in range(self.size)]

    @contextmanager
    def together(self) -> Iterator[StopFlag]:
        """A phase of the start without collectives: an error on any rank is raised on all (InputError) at its end.

        The flag is set as soon as one rank has an error. Whoever works for long looks at it, so that no rank goes on
        for nothing, and raises LoadingStopped, which is not told beside the error itself.
        """
        stop: StopFlag = threading.Event()
        if self._store is not None:
            stop = _SharedFlag(self._store, f"paceline/stop/{self._exchanges}")
        error: Exception | None = None
        try:
            yield stop
        except (ValueError, OSError, torch.cuda.OutOfMemoryError, LoadingStopped) as caught:
            error = caught
            stop.set()
        self._agree(error)

    def _agree(self, error: Exception | None) -> None:
        """Raise on every rank where any has an error; the same message from several ranks is given once."""
        own = "" if error is None or isinstance(error, LoadingStopped) else describe(error)
        messages = self.exchange(own)
        ranks_of: dict[str, list[int]] = {}
        for rank, message in enumerate(messages):
            if message:
                ranks_of.setdefault(message, []).append(rank)
        if not ranks_of:
            if error is not None:
                raise error
            return
        parts = []
        for message, ranks in ranks_of.items():
            everywhere = len(ranks) == self.size
            parts.append(message if everywhere else f"rank {', '.join(map(str, ranks))}: {message}")
        raise InputError("; ".join(parts)) from error

    def abandon(self) -> None:
        """Leave the group in the middle of a step, so that ranks that wait in a collective learn of it.

        gloo tells them by the closed connection. NCCL does not, and closing it could wait for them: there rank 0
        watches the step channel instead.
        """
        if self.device.type == "cpu":
            self.close()

    def watch(self, check_others: Callable[[], None]) -> None:
        """Have this called while a collective of gloo keeps this rank waiting; it raises where another is gone."""
        if isinstance(self.communicator, ProcessGroupCommunicator):
            self.communicator.check_others = check_others

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self._store is not None:
            self._store = None
            if isinstance(self.communicator, ProcessGroupCommunicator):
                self.communicator.close()


class _SharedFlag:
    """A flag of all ranks in the store that they met through. Several threads may ask; the store is asked seldom."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store = store
        self._key = key
        self._is_set = False
        self._asked_at = 0.0

    def set(self) -> None:
        self._is_set = True
        self._store.set(self._key, "")

    def is_set(self) -> bool:
        if not self._is_set and time.monotonic() > self._asked_at + STOP_POLL_S:
            self._asked_at = time.monotonic()
            self._is_set = self._store.check([self._key])
        return self._is_set


def check_world_size(tensor_parallel_size: int, world_size: int) -> None:
    """Raise InputError where torchrun started another number of ranks than the model is to be split over."""
    if tensor_parallel_size == world_size:
        return
    started = f"{world_size} rank{'s were' if world_size > 1 else ' was'} started"
    raise InputError(
        f"tensor parallel size {tensor_parallel_size} needs as many ranks, but {started}; "
        f"use `torchrun --nproc-per-node {tensor_parallel_size} …` or --tp {world_size}"
    )


def choose_device(wanted: str, local_rank: int, size: int) -> torch.device:
    """The device of this rank: cuda:local_rank among the visible GPUs, or the CPU.

    CUDA_VISIBLE_DEVICES is left to CUDA: it may hold indices in any order, UUIDs or MIG names.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        if wanted == "cuda":
            raise InputError("no GPU is visible; use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES")
        return torch.device("cpu")
    if size > visible:
        raise InputError(
            f"{size} ranks need {size} GPUs, but {visible} {'is' if visible == 1 else 'are'} visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); "
            f"use --tp {visible}, or --device cpu"
        )
    return torch.device("cuda", local_rank)


def describe(error: BaseException) -> str:
    """One line for a person: the message of the errors meant for them, with the type for all others."""
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, EngineError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
