"""SIGTERM as an exception, so that a process that is told to end clears away what it has made."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """A handler: the process ends with 128 + the signal's number, through all that is to be done before."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM ends the process so while this lasts, unless the program has a handler of its own. Main thread alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is exit_on_signal:  # who has set another since wants to keep it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """SIGTERM and SIGINT are handled after this. Main thread alone.

    For what must not be torn apart: making what somebody has to remove; or the import of torch, whose native code
    imports numpy and drops whatever that raises, a handler's exception too: the process would go on as if it had not
    been told to end.
    """
    held: list[int] = []
    # Not by a mask: another thread then takes a signal for the process, and its handler runs in this one all the same.
    before = {
        number: signal.signal(number, lambda number, frame: held.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


@contextlib.contextmanager
def task_ending_in_order() -> Iterator[None]:
    """The same for a task inside of `ending_in_order`: it is cancelled where it waits, and not torn out of a step."""
    task = asyncio.current_task()
    if task is None or signal.getsignal(signal.SIGTERM) is not exit_on_signal:
        yield
        return
    loop = asyncio.get_running_loop()
    told = []

    def cancel(number: int, frame: FrameType | None) -> None:
        told.append(number)
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if told:
            raise SystemExit(128 + told[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, exit_on_signal)
