"""The ways in which a model cannot be served as given; each message is one line that says what is wrong."""

from __future__ import annotations


class ModelConfigError(ValueError):
    """A config.json that is damaged, contradicts itself, or describes a model that is not supported."""


class CheckpointError(ValueError):
    """Weight files that are damaged, or that do not hold what the config says."""


class CollectiveError(RuntimeError):
    """A collective that failed here, most often since another rank is gone."""


class LoadingStopped(Exception):
    """This rank stopped loading because of a fault that another met, and that the other one tells."""
