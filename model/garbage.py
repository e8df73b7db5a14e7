"""Python's garbage collector while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Within, the collector rests: nearly all that a start makes lives on, and would be looked through time and again.

    A collection goes through everything that was imported, which takes 0.1 s and lets no thread run. A first start,
    which compiles kernels in Python, spends a tenth of its time so.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
