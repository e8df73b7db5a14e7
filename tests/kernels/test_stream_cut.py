"""The rule by which products are cut, on the GPU that it was measured on and on smaller ones."""

from __future__ import annotations

import pytest

from paceline.kernels.stream_cut import BUCKETS, Cut, bucket_of, cut_product, num_tiles


@pytest.mark.parametrize(
    ("num_rows", "bucket"),
    [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16), (17, 32), (100, 128), (129, 192), (193, 256), (256, 256), (257, None)],
)
def test_buckets(num_rows: int, bucket: int | None) -> None:
    assert bucket_of(num_rows) == bucket


def cuts(num_columns: int, size: int, *, gated: bool = False, processors: int = 132) -> list[Cut | None]:
    """The cut of a product on an H200, or on a part of one, for each bucket."""
    gpu = {"processors": processors, "shared_bytes": 227 << 10}
    return [cut_product(num_columns, size, bucket, gated=gated, **gpu) for bucket in BUCKETS]


def test_with_a_tile_for_most_processors_the_ring_is_as_deep_as_it_fits() -> None:
    few = [Cut(8, 128, 11), Cut(8, 128, 11), Cut(16, 128, 10), Cut(32, 128, 8), Cut(64, 128, 6)]
    assert cuts(4096, 1024) == [*few, Cut(64, 128, 6), Cut(128, 64, 8), Cut(128, 64, 8)]
    assert cuts(3072, 1024, gated=True) == [*few, Cut(128, 64, 8), Cut(64, 128, 6), Cut(128, 64, 8)]


def test_with_few_tiles_the_inner_dimension_is_cut_and_for_few_rows_the_ring_is_half_as_deep() -> None:
    found = cuts(1024, 3072)[:5]
    assert found == [Cut(8, 128, 5, 8), Cut(8, 128, 5, 8), Cut(16, 128, 5, 8), Cut(32, 128, 4, 8), Cut(64, 128, 6, 8)]
    assert [cut.max_registers for cut in found if cut is not None] == [128, 128, 128, 128, None]
    assert cuts(384, 1024, gated=True)[4] == Cut(64, 128, 6, 8)


@pytest.mark.parametrize(
    ("num_columns", "rows"),
    [
        (384, [64, 32, 32, 32]),
        (1024, [64, 32, 32, 64]),
        (2048, [32, 64, 64, 64]),
        (4096, [64, 64, 128, 128]),
        (6144, [64, 128, 64, 128]),
    ],
)
def test_many_rows_are_in_as_many_tiles_as_processors_have_room_for(num_columns: int, rows: list[int]) -> None:
    assert [cut.rows for cut in cuts(num_columns, 2048)[4:] if cut is not None] == rows


def test_three_groups_of_warps_share_the_rows_where_their_tiles_fill_the_processors() -> None:
    large = [
        Cut(8, 128, 4, 1, 3),
        Cut(8, 128, 4, 1, 3),
        Cut(16, 128, 4, 1, 3),
        Cut(32, 128, 3, 1, 3),
        Cut(64, 128, 3, 1, 3),
    ]
    many = Cut(128, 64, 5, 1, 3)
    assert cuts(12288, 4096, gated=True) == [*large, many, Cut(64, 128, 3, 1, 3), many]
    for num_columns, gated, groups in ((151936, False, 3), (128256, False, 1), (8192, True, 1), (6144, False, 1)):
        cut = cuts(num_columns, 4096, gated=gated)[4]
        assert cut is not None
        assert (cut.groups, cut.pieces) == (groups, 1)


@pytest.mark.parametrize(
    ("num_columns", "gated", "processors", "pieces"),
    [
        (1024, False, 132, 8),
        (1040, False, 132, 4),
        (2112, False, 132, 4),
        (2128, False, 132, 1),
        (512, True, 132, 8),
        (1056, True, 132, 4),
        (1072, True, 132, 1),
        (1024, False, 114, 4),
        (2048, False, 114, 1),
    ],
)
def test_programs_that_wait_for_each_other_have_a_processor_each(
    num_columns: int, gated: bool, processors: int, pieces: int
) -> None:
    for bucket, cut in zip(BUCKETS, cuts(num_columns, 2048, gated=gated, processors=processors), strict=True):
        assert cut is not None
        tiles = num_tiles(num_columns, gated) * -(-bucket // cut.rows)
        if bucket <= 32:
            assert cut.pieces == pieces
        assert cut.pieces == 1 or (cut.rows >= bucket and tiles * cut.pieces <= processors)


@pytest.mark.parametrize(
    ("num_columns", "size", "gated", "shared_bytes"),
    [(4096, 1004, False, 227 << 10), (4088, 1024, True, 227 << 10), (4096, 1024, False, 163 << 10)],
    ids=["inner dimension", "columns", "small GPU"],
)
def test_what_cannot_be_streamed(num_columns: int, size: int, gated: bool, shared_bytes: int) -> None:
    gpu = {"processors": 132, "shared_bytes": shared_bytes}
    assert [cut_product(num_columns, size, bucket, gated=gated, **gpu) for bucket in BUCKETS] == [None] * len(BUCKETS)
