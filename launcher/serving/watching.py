"""GET /v1/engine: one moment of the engine as JSON, for the page's live view and whoever else wants to watch."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from typing import Any

import numpy as np
from fastapi import APIRouter

from paceline.coordinator.block_manager import CACHED, FREE, SHARED
from paceline.coordinator.view import EngineView
from paceline.launcher.serving.door import Door

MOST_CELLS = 4096
"""The map of blocks has at most so many cells; in a larger cache each stands for several blocks."""
NOT_SHOWN = ("ranks", "step_seconds", "step_requests", "step_tokens")
"""Of the statistics: what has a place of its own, and the distributions, which /metrics has."""
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
            "ranks": [
                {**dataclasses.asdict(state), "device": device}
                for state, device in zip(view.stats.ranks, info.devices, strict=True)
            ],
            "stats": {name: value for name, value in dataclasses.asdict(view.stats).items() if name not in NOT_SHOWN},
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
    missing = -len(holders) % per_cell
    blocks = np.pad(np.frombuffer(holders, np.int32), (0, missing), constant_values=FREE).reshape(-1, per_cell)
    shared, cached = blocks == SHARED, blocks == CACHED
    used = (blocks >= 0) | shared
    first = np.where(used, blocks, np.iinfo(np.int32).max).min(1)
    last = np.where(used, blocks, np.iinfo(np.int32).min).max(1)
    slots = np.where((first == last) & (first >= 0), first, -1)
    cells = np.stack([used.sum(1), shared.sum(1), cached.sum(1), slots], axis=1)
    starts = np.flatnonzero(np.append(True, (cells[1:] != cells[:-1]).any(1)))
    lengths = np.diff(np.append(starts, len(cells)))
    runs = [
        [length, *counts, None if slot < 0 else slot]
        for length, (*counts, slot) in zip(lengths.tolist(), cells[starts].tolist(), strict=True)
    ]
    return {"number": len(holders), "block_size": block_size, "blocks_per_cell": per_cell, "runs": runs}
