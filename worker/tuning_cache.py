"""What was measured of kernels on a GPU model, kept on disk, so that only the first start measures.

One small JSON file for products that are measured together, replaced as a whole: ranks and engines that start together
write the same files, and the last one wins. What cannot be read or does not fit is measured again; a folder that cannot
be written costs every start the measurement, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from pathlib import Path

import torch
import triton
import xxhash

import paceline.kernels

logger = logging.getLogger(__name__)

Choice = dict[int, tuple[bool, ...]]
"""For each bucket of rows that was measured, which of the products are streamed in the fastest way."""


class TuningCache:
    """The choices of one GPU model and one build of the kernels."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told = False

    @classmethod
    def of(cls, device: torch.device) -> TuningCache:
        """The user's cache for this GPU: in $XDG_CACHE_HOME/paceline, or ~/.cache/paceline."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        gpu = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device))
        return cls(Path(home, "paceline", "products", f"{gpu}-{_build()}"))

    def read(self, name: str, count: int) -> Choice:
        """What is known of so many products; empty where nothing is."""
        path = self._path(name)
        try:
            return _choice(json.loads(path.read_text()), count)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be used and is measured again: %s", path, error)
            return {}

    def write(self, name: str, choice: Choice) -> None:
        """Keep what is known of some products."""
        content = json.dumps(choice)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=f"{name}.", delete=False) as file:
                file.write(content)
            os.replace(file.name, self._path(name))
        except OSError as error:
            if not self._told:
                logger.info("what was measured of kernels cannot be kept, so every start measures: %s", error)
            self._told = True

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _build() -> str:
    """What a measurement depends on beside the GPU: the kernels, their compiler, and the library."""
    folder = Path(next(iter(paceline.kernels.__path__)))
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    versions = f"{triton.__version__} {torch.__version__} {torch.version.cuda}"
    return xxhash.xxh3_64_hexdigest(sources + versions.encode())


def _choice(content: object, count: int) -> Choice:
    """Raises ValueError for what no choice among so many products is written as."""
    if not isinstance(content, dict) or not all(_is_way(way, count) for way in content.values()):
        raise ValueError(f"it is no JSON object of lists of {count} booleans")
    return {int(rows): tuple(way) for rows, way in content.items()}


def _is_way(way: object, count: int) -> bool:
    return isinstance(way, list) and len(way) == count and all(isinstance(streamed, bool) for streamed in way)
