"""How many files a process may have open; every connection is one."""

from __future__ import annotations

import resource

MOST_OPEN_FILES = 65_536
"""Many systems allow 1,024 unless a process asks for more."""


def allow_open_files() -> None:
    """Raise this process's soft limit as far as its hard limit and MOST_OPEN_FILES let it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
