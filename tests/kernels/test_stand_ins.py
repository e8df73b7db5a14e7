"""Tensors without content, in the place of a GPU's: where kernels are compiled, no value is computed or changed."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional

from paceline.kernels.stand_ins import StandIns, is_stand_in, may_be_stand_ins

GPU = torch.device("cuda", 0)


class OwnParameter(nn.Parameter):
    """A class of one's own, which torch treats as a foreign one in places."""


def test_what_is_made_on_the_device_has_a_shape_there_and_no_content() -> None:
    with StandIns(GPU):
        made = torch.empty((1 << 20, 1 << 20), dtype=torch.bfloat16, device=GPU)
        again = torch.zeros(3, device="cuda")
        part = made[2:, 5]
        assert made.device == part.device == again.device == GPU
        assert made.is_cuda and part.is_cuda
        assert part.shape == ((1 << 20) - 2,)
        assert part.storage_offset() == (2 << 20) + 5
    assert is_stand_in(made) and is_stand_in(part)


def test_an_operation_with_a_stand_in_gives_one_and_changes_nothing() -> None:
    weight = OwnParameter(torch.ones(7, 4), requires_grad=False)
    table = torch.zeros(7, 4)
    with torch.inference_mode(), StandIns(GPU):
        ids = torch.empty(5, dtype=torch.int64, device=GPU)
        rows = functional.embedding(ids, weight)
        product = functional.linear(rows, weight)
        table.index_copy_(0, ids, rows)
        kept = table.index_select(0, ids).float()
        assert [tuple(each.shape) for each in (rows, product, kept)] == [(5, 4), (5, 7), (5, 4)]
        assert all(is_stand_in(each) and each.device == GPU for each in (rows, product, kept))
    assert not table.any()


def test_other_operations_are_carried_out() -> None:
    values = torch.arange(6)
    with StandIns(GPU):
        values[2:4].add_(10)
        assert values.device.type == "cpu" and not values.is_cuda
        assert values.tolist() == [0, 1, 12, 13, 4, 5]


def test_stand_ins_are_looked_for_within_alone_and_in_the_thread_that_is() -> None:
    assert not may_be_stand_ins()
    with StandIns(GPU), ThreadPoolExecutor(1) as pool:
        assert may_be_stand_ins()
        assert not pool.submit(may_be_stand_ins).result()
        with StandIns(GPU):
            assert may_be_stand_ins()
        assert may_be_stand_ins()
    assert not may_be_stand_ins()


def test_a_step_without_content_imports_no_compiler() -> None:
    """It would take the start of an engine longer than what it does with them."""
    script = """
import sys, torch
from torch.nn import functional
from paceline.kernels.stand_ins import StandIns
with torch.inference_mode(), StandIns(torch.device("cuda")):
    x = functional.embedding(torch.empty(5, dtype=torch.int64, device="cuda"), torch.ones(7, 4))
    x = functional.linear(x, torch.ones(3, 4)).index_select(0, torch.zeros(2, dtype=torch.int64, device="cuda")).float()
    torch.empty_like(x).view(-1).split(2)[0].contiguous()
    torch.randn((2, 3), dtype=torch.bfloat16, device="cuda")
sys.exit(not {"torch._dynamo", "sympy"}.isdisjoint(sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
