"""GET /v1/engine: one moment of the engine as JSON, for the page's live view and whoever else wants to watch."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from typing import Any

from fastapi import APIRouter

from paceline.coordinator.block_manager import CACHED, FREE, SHARED
from paceline.coordinator.view import EngineView
from paceline.launcher.serving.door import Door

MOST_CELLS = 4096
"""The map of blocks has at most so many cells; in a larger cache each stands for several blocks."""
SHARE_SECONDS = 0.25
"""However many watch, the engine is asked once in so long."""


def engine_routes(door: Door) -> APIRouter:
    """The route of those who watch."""
    router = APIRouter()
    latest = _Latest(door)

    @router.get("/v1/engine")
    async def engine() -> dict[str, Any]:
        """Ranks, counters, requests, blocks and the latest steps, of now or up to a quarter of a second ago."""
        info = door.ready_engine()
        view = await latest.get()
        return {
            "model": door.model_name,
            "max_model_len": info.max_model_len,
            "taken": view.taken,
            "ranks": [{"rank": rank, "device": device} for rank, device in enumerate(info.devices)],
            "stats": dataclasses.asdict(view.stats),
            "blocks": block_map(view.block_holders, info.block_size),
            "requests": [each._asdict() for each in view.requests],
            "steps": [each._asdict() for each in view.steps],
        }

    return router


class _Latest:
    """The last view taken, asked for again once it is too old. Belongs to one event loop."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._lock = asyncio.Lock()
        self._view: EngineView | None = None
        self._asked = 0.0

    async def get(self) -> EngineView:
        async with self._lock:
            if self._view is None or time.monotonic() > self._asked + SHARE_SECONDS:
                self._asked = time.monotonic()
                self._view = await self._door.engine.view()
            return self._view


def block_map(holders: array[int], block_size: int) -> dict[str, Any]:
    """The blocks in their order, as cells of equally many, and equal cells that follow each other as one run.

    `runs` are [cells, used, shared, cached, slot]: how many cells are alike, how many blocks of each are used, how many
    of these by several requests, how many are cached, and the slot of the one request that holds all that are used.
    """
    per_cell = -(-len(holders) // MOST_CELLS)
    runs: list[list[int | None]] = []
    for start in range(0, len(holders), per_cell):
        cell = _cell(holders[start : start + per_cell])
        if runs and runs[-1][1:] == cell:
            runs[-1][0] += 1  # type: ignore[operator]
        else:
            runs.append([1, *cell])
    return {"number": len(holders), "block_size": block_size, "blocks_per_cell": per_cell, "runs": runs}


def _cell(holders: array[int]) -> list[int | None]:
    cached, shared = holders.count(CACHED), holders.count(SHARED)
    used = len(holders) - holders.count(FREE) - cached
    slots = {*holders} - {FREE, CACHED} if used else set()
    slot = slots.pop() if len(slots) == 1 else SHARED
    return [used, shared, cached, None if slot == SHARED else slot]
