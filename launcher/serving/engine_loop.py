"""Rank 0 while it serves: requests in from the HTTP process, steps, and what each step gave out again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import zmq

from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.engine import Engine
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.messages import (
    Abort,
    AskStats,
    AskView,
    Drain,
    EngineFailed,
    EngineReady,
    FrontCut,
    FrontFailed,
    FrontReady,
    Message,
    News,
    Refused,
    Stats,
    Submit,
    View,
    decode,
    encode,
)

IDLE_MS = 100
"""How long an engine without work waits for a message before it looks after its processes; a message ends the wait."""


class EngineLoop:
    """Carries out what the HTTP process asks over one socket. One thread owns it, and with it the engine.

    Token ids and sampling rules are all it sees: texts, their stop strings included, are the other process's business.
    """

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self.front_is_ready = False
        """Whether the HTTP process has said that it takes requests. Before that nobody listens to this end."""
        self.cut_answers = 0
        """How many the HTTP process has cut off, since the server was to end."""

    @property
    def info(self) -> EngineInfo:
        """What the HTTP process has to know of the engine."""
        config, limits = self._engine.config, self._engine.limits
        return EngineInfo(
            vocab_size=limits.vocab_size,
            max_model_len=min(limits.max_model_len, limits.num_blocks * config.block_size),
            num_blocks=limits.num_blocks,
            block_size=config.block_size,
            end_ids=self._engine.end_ids,
            tensor_parallel_size=config.tensor_parallel_size,
            devices=self._engine.devices,
        )

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until `until` is true; it is asked before every step, and at least every IDLE_MS.

        Raises EngineError where a rank failed or the HTTP process could not start; the former is told to it first.
        """
        try:
            while not until():
                self.take_messages()
                if self._engine.coordinator.has_work:
                    events = self._engine.coordinator.step()
                    if events:
                        began = time.monotonic()
                        self._send(News(events))
                        self._engine.coordinator.step_times.deliver.add(time.monotonic() - began)
                else:
                    self._engine.check_ranks()
                    self._socket.poll(IDLE_MS)
        except EngineError as error:
            self._send(EngineFailed(str(error)))
            raise

    def drain(self, seconds: float) -> None:
        """Have the HTTP process take no more requests, finish those that run within so many seconds, and end; at once
        when told again.

        Raises EngineError where a rank is gone: torchrun sends the signal for that, too.
        """
        self._engine.check_ranks()
        self._send(Drain(seconds))

    def _send(self, message: Message) -> None:
        """Tell the HTTP process something, if it is there; never waits."""
        with contextlib.suppress(zmq.Again):  # not connected yet, or gone, which `until` looks after
            self._socket.send(encode(message), zmq.NOBLOCK)

    def take_messages(self) -> None:
        """Carry out every message that is there."""
        while True:
            try:
                buffer = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._carry_out(decode(buffer))

    def _carry_out(self, message: Message) -> None:
        match message:
            case Submit():
                self._add(message)
            case Abort():
                self._engine.coordinator.abort(message.request_id)
            case AskStats():
                self._send(Stats(message.number, self._engine.coordinator.stats()))
            case AskView():
                self._send(View(message.number, self._engine.coordinator.view()))
            case FrontReady():
                self.front_is_ready = True
                self._send(EngineReady(self.info))
            case FrontCut():
                self.cut_answers = message.answers
            case FrontFailed():
                raise EngineError(message.error)
            case _:
                raise EngineError(f"the HTTP process sent {type(message).__name__}, which only the engine may say")

    def _add(self, message: Submit) -> None:
        """Queue a request, or say why it can never run; the others go on."""
        try:
            self._engine.coordinator.add_request(
                message.request_id,
                message.prompt_token_ids,
                message.params,
                eos_token_ids=self._engine.end_ids,
                priority=message.priority,
                cache_salt=message.cache_salt,
            )
        except InputError as error:
            self._send(Refused(message.request_id, str(error)))
