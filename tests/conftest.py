"""Set-up of the whole test run: Triton's interpreter where there is no GPU, GPU tests skipped there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
if _GPUS == 0:
    # Triton reads this when a kernel is decorated, so it must be set before any test imports one.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are."""
    for item in items:
        for marker, needed in (("gpu", 1), ("gpu2", 2)):
            if marker in item.keywords and needed > _GPUS:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPUs, found {_GPUS}"))
