"""The rule by which products are cut, on the GPU that it was measured on and on smaller ones."""

from __future__ import annotations

import pytest

from paceline.kernels.stream_cut import BUCKETS, Cut, bucket_of, cut_product, num_tiles

H200 = {"processors": 132, "shared_bytes": 227 << 10}


@pytest.mark.parametrize(
    ("num_rows", "bucket"), [(2, 8), (8, 8), (9, 16), (16, 16), (17, 32), (100, 128), (256, 256), (257, 512)]
)
def test_buckets(num_rows: int, bucket: int) -> None:
    assert bucket_of(num_rows) == bucket


def test_with_a_tile_for_most_processors_the_ring_is_as_deep_as_it_fits() -> None:
    cuts = [cut_product(4096, 1024, bucket, gated=False, **H200) for bucket in BUCKETS]
    assert cuts == [Cut(8, 128, 11), Cut(16, 128, 10), Cut(32, 128, 8), Cut(64, 128, 6), Cut(128, 64, 8), None]
    assert cut_product(3072, 1024, 256, gated=True, **H200) == Cut(256, 64, 5)


def test_with_few_tiles_the_inner_dimension_is_cut_and_for_few_rows_the_ring_is_half_as_deep() -> None:
    cuts = [cut_product(1024, 3072, bucket, gated=False, **H200) for bucket in BUCKETS[:-1]]
    assert cuts == [Cut(8, 128, 5, 8), Cut(16, 128, 5, 8), Cut(32, 128, 4, 8), Cut(64, 128, 6, 8), Cut(128, 64, 8, 8)]
    assert cut_product(384, 1024, 256, gated=True, **H200) == Cut(256, 64, 5, 8)
    assert [cut.max_registers for cut in cuts if cut is not None] == [128, 128, 128, None, None]


def test_three_groups_of_warps_share_the_rows_where_their_tiles_fill_the_processors() -> None:
    cuts = [cut_product(12288, 4096, bucket, gated=True, **H200) for bucket in BUCKETS]
    large = [Cut(8, 128, 4, 1, 3), Cut(16, 128, 4, 1, 3), Cut(32, 128, 3, 1, 3), Cut(64, 128, 3, 1, 3)]
    assert cuts == [*large, Cut(128, 64, 5, 1, 3), Cut(256, 64, 5)]
    for num_columns, gated, groups in ((151936, False, 3), (128256, False, 1), (8192, True, 1), (6144, False, 1)):
        cut = cut_product(num_columns, 4096, 64, gated=gated, **H200)
        assert cut is not None
        assert (cut.groups, cut.pieces) == (groups, 1)


@pytest.mark.parametrize(
    ("num_columns", "gated", "processors", "pieces"),
    [
        (1024, False, 132, 8),
        (1025, False, 132, 4),
        (2112, False, 132, 4),
        (2113, False, 132, 1),
        (512, True, 132, 8),
        (1056, True, 132, 4),
        (1064, True, 132, 1),
        (1024, False, 114, 4),
        (2048, False, 114, 1),
    ],
)
def test_programs_that_wait_for_each_other_have_a_processor_each(
    num_columns: int, gated: bool, processors: int, pieces: int
) -> None:
    for bucket in BUCKETS[:-1]:
        cut = cut_product(num_columns, 2048, bucket, gated=gated, processors=processors, shared_bytes=227 << 10)
        assert cut is not None
        assert cut.pieces == pieces
        assert pieces == 1 or num_tiles(num_columns, gated) * pieces <= processors


@pytest.mark.parametrize(
    ("num_columns", "size", "gated", "shared_bytes"),
    [(4096, 1004, False, 227 << 10), (4092, 1024, True, 227 << 10), (4096, 1024, False, 163 << 10)],
    ids=["inner dimension", "columns of gate and up", "small GPU"],
)
def test_what_cannot_be_streamed(num_columns: int, size: int, gated: bool, shared_bytes: int) -> None:
    gpu = {"processors": 132, "shared_bytes": shared_bytes}
    assert [cut_product(num_columns, size, bucket, gated=gated, **gpu) for bucket in BUCKETS] == [None] * 6
