"""From what a person wrote as the model to a folder that holds its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.coordinator.errors import InputError
from paceline.launcher.default_model import MODEL_NAME, default_model_path

WANTED_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
"""Weights, configs, tokenizers and chat templates. Never pickled weights (*.bin, *.pt), and never code (*.py)."""
CONFIG_FILES = ["config.json", "generation_config.json"]
UNWANTED_FILES = ["*/*", "consolidated*.safetensors"]
"""Copies of the weights in other formats, which some repositories keep beside or in folders of their own."""


def resolve_checkpoint(model: str | None, *, revision: str | None = None, weights: bool = True) -> Path:
    """The checkpoint folder that model names, fetched first where it is not on this machine.

    weights False fetches the configs alone, for who only wants to know the model's shape.

    model is None or smollm2-135m-instruct (the default model), a folder, or a Hugging Face id `org/name`;
    revision is a branch, tag or commit of the latter. The hub's own settings hold: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN,
    HF_ENDPOINT. Safe in several processes at once, since the hub's cache locks each file: still, let the first rank of
    a host call it and the others wait, to ask the hub once.

    Raises InputError, in one line, for what cannot be had.
    """
    if model is None or model.lower() == MODEL_NAME.lower():
        _refuse_revision(revision, "the default model")
        return _checked_folder(default_model_path())
    folder = Path(os.path.expanduser(model))
    if model and folder.is_dir():
        _refuse_revision(revision, f"the folder {folder}")
        return _checked_folder(folder)
    if not _looks_like_hub_id(model):
        raise InputError(f"model {model!r} is not a folder on this machine, nor a Hugging Face id such as org/name")
    return _from_hub(model, revision, weights)


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise InputError(f"a revision needs a model of the Hugging Face hub, and {what} is not one; drop the revision")


def _checked_folder(folder: Path) -> Path:
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the folder {str(folder)!r} cannot be read: its path is no UTF-8, which safetensors and tokenizers need; "
            "rename it"
        ) from error
    _refuse_pipes(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json; name the folder of a Hugging Face checkpoint")
    return folder


def _refuse_pipes(folder: Path) -> None:
    """Raise InputError where something would be waited for as soon as it is opened, here or by transformers."""
    for path in (path for pattern in WANTED_FILES for path in sorted(folder.glob(pattern))):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(f"{path} is not a regular file but a pipe, socket or device; put the file in its place")


def _looks_like_hub_id(model: str) -> bool:
    owner, _, name = model.partition("/")
    return bool(owner and name) and "/" not in name and owner[0] not in ".~"


def _from_hub(repo: str, revision: str | None, weights: bool) -> Path:
    # Only here: the hub's client takes half a second to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        wanted = WANTED_FILES if weights else CONFIG_FILES
        found = snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED_FILES)
    except HFValidationError as error:
        raise InputError(f"{repo!r} is neither a folder on this machine nor a valid Hugging Face id") from error
    except GatedRepoError as error:
        raise InputError(
            f"{repo} is gated: accept its licence on its Hugging Face page, then set HF_TOKEN to your token"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"Hugging Face has no model {repo}, or it is private; check the name, or set HF_TOKEN to your token"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{repo} has no revision {revision!r}; name a branch, tag or commit of it") from error
    except LocalEntryNotFoundError as error:
        raise InputError(_not_reached(repo)) from error
    except HfHubHTTPError as error:
        raise InputError(f"Hugging Face refused {repo} ({_first_line(error)}); try again later") from error
    except OSError as error:
        raise InputError(
            f"{repo} could not be fetched ({_first_line(error)}); check the network and the room in HF_HOME"
        ) from error
    folder = _checked_folder(Path(found))
    if weights and not any(folder.glob("*.safetensors")):
        raise InputError(f"{repo} has no *.safetensors weights, the only kind that is loaded; name another model")
    return folder


def _not_reached(repo: str) -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    missing = f"{repo} is not (wholly) in the Hugging Face cache"
    if HF_HUB_OFFLINE:
        return f"{missing} and HF_HUB_OFFLINE is set; unset it, or name a checkpoint folder"
    return f"{missing} and the hub cannot be reached; check the network, or name a checkpoint folder"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
