"""Columns copied from a mapped file are its bytes, and a file that cannot be had is told, not died of."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.model import mapped_columns
from paceline.model.mapped_columns import MappedFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """300,000 random bytes."""
    path = tmp_path / "matrix"
    path.write_bytes(np.random.default_rng(0).bytes(300_000))
    return path


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("window", [1, 5_000, 16 << 20])
@pytest.mark.parametrize(
    ("first", "pitch", "width", "rows"),
    [(0, 64, 16, 50), (4096, 4096, 4096, 20), (12_345, 7_001, 3, 40), (299_000, 700, 300, 2), (5, 1000, 999, 1)],
)
def test_each_row_is_its_part_of_the_file(
    first: int,
    pitch: int,
    width: int,
    rows: int,
    window: int,
    path: Path,
    descriptor: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where mappings begin within a page, and where a window holds less than a row."""
    monkeypatch.setattr(mapped_columns, "WINDOW_BYTES", window)
    out = np.zeros((rows, width), np.uint8)
    with MappedFile(descriptor) as file:
        assert file.copy_columns(first, pitch, out)
    content = path.read_bytes()
    for row in range(rows):
        start = first + row * pitch
        assert out[row].tobytes() == content[start : start + width]


def test_no_more_than_a_window_is_resident(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(256 << 20)
    out = np.ones((1 << 12, 1 << 10), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with path.open("rb") as file, MappedFile(file.fileno()) as mapped:
        assert mapped.copy_columns(0, 64 << 10, out)
    assert not out.any()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < mapped_columns.WINDOW_BYTES + (16 << 20)


def test_a_file_that_is_too_short(descriptor: int) -> None:
    with MappedFile(descriptor) as file:
        assert not file.copy_columns(299_000, 700, np.zeros((2, 301), np.uint8))


def test_what_cannot_be_mapped() -> None:
    """Some file systems have no mappings; a pipe has none either."""
    end, other = os.pipe()
    with MappedFile(end) as file:
        assert not file.copy_columns(0, 64, np.zeros((2, 16), np.uint8))
    os.close(end)
    os.close(other)


def test_a_file_cut_after_it_was_mapped(path: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are gone, and a copy would end the process by SIGBUS."""
    if not _knows_populate():
        pytest.skip("this system cannot tell beforehand that pages are gone (Linux 5.14 can)")
    populate = mapped_columns._populate

    def cut_first(address: int, length: int) -> bool:
        os.truncate(path, 100_000)
        return populate(address, length)

    monkeypatch.setattr(mapped_columns, "_populate", cut_first)
    with MappedFile(descriptor) as file:
        assert not file.copy_columns(0, 10_000, np.zeros((30, 100), np.uint8))


def _knows_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(mapped_columns._MADV_POPULATE_READ)
        except OSError:
            return False
    return True
