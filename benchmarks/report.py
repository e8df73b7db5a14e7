"""What every benchmark says of where it ran, and how its figures are kept."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import paceline

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """Machine, versions and commit of this run; of a copy without its history the commit is in COMMIT."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT") or described.stdout.strip(),
        "machine": gpu or f"{_processor()}, {os.cpu_count()} cores",
        "gpus": torch.cuda.device_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "paceline": paceline.__version__,
    }


def write(name: str, figures: dict[str, Any]) -> None:
    """Keep a run as benchmarks/results/NAME.json, with its environment."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **figures}, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}", file=sys.stderr)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
