"""Compile every Triton kernel for sm_90, which needs no GPU; test_compile.py runs this without the interpreter.

The operations are called as on a GPU, within `compile_only`, so that what is compiled is what they launch.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import paceline.kernels
from paceline.kernels.advance_rows import advance_rows
from paceline.kernels.decode_work import plan_decode
from paceline.kernels.gumbel_argmax import gumbel_argmax
from paceline.kernels.launch import compile_only
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.paged_decode_attention import paged_decode_attention_triton
from paceline.kernels.paged_prefill_attention_triton import paged_prefill_attention_triton
from paceline.kernels.prepare_inputs import prepare_inputs
from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.rotary_and_store import HeadPlaces, rotary_and_store
from paceline.kernels.silu_and_mul import silu_and_mul
from paceline.kernels.skinny_linear import skinny_add_linear, skinny_linear
from paceline.kernels.store_runs import store_runs
from paceline.kernels.streamed_linear import Stream, cuts_of, make_exchange, streamed_linear
from paceline.kernels.tiled_linear import heads_tiling, tiled_gated_linear, tiled_heads_linear
from paceline.kernels.top_k_top_p import find_cutoffs

MAX_SHARED_BYTES = 227 * 1024
SLOTS, MAX_LEN, BLOCK_SIZE, NUM_BLOCKS = 256, 4096, 16, 1000
HEADS = ((9, 3, 64), (32, 32, 80), (16, 8, 128), (32, 8, 256))
"""Heads, KV heads, head dimension."""
LINEAR = (
    # Columns, inner dimension, norm with residual, gated
    (4096, 1024, True, False),
    (3072, 1024, True, True),
    (1024, 3072, False, False),
    (151936, 1024, True, False),
    (12288, 4096, True, True),
)

STREAMED = (
    # Columns, inner dimension, gated: in one piece, in eight; some cut as these; with three groups of warps.
    (4096, 1024, False),
    (1024, 3072, False),
    (3072, 1024, True),
    (384, 1024, True),
    (6144, 2048, False),
    (12288, 4096, True),
)
TILED = (
    # Rows, inner dimension, heads, KV heads, head dimension, norm, bias: in tiles of 256 columns, then of 128.
    (8192, 2048, 32, 8, 128, True, False),
    (8192, 896, 14, 2, 64, False, True),
)
STREAMED_VARIANTS = 2 * 5 + 2 * 4 + 5 + 1


class Hopper:
    """What Triton asks of a GPU's driver to compile for it and to load what was compiled."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": MAX_SHARED_BYTES},
        load_binary=lambda *arguments: ("module", "function", 0, 0, 1024),
    )

    def launcher_cls(self, *arguments: object) -> str:
        return "launcher"

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of a shape, on the GPU that is not there."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def ints(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)


def floats(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.float32)


def call_all() -> None:
    """Call every operation with what models of several shapes give it."""
    prepare_inputs(
        ints(SLOTS, MAX_LEN), ints(SLOTS), ints(SLOTS, MAX_LEN // BLOCK_SIZE), ints(8), ints(9), 8, BLOCK_SIZE
    )
    store_runs(ints(1000), ints(100), 3, 20)
    lens = ints(SLOTS), ints(SLOTS)
    advance_rows(tensor(8, dtype=torch.int64), ints(8), ints(9), ints(8), ints(SLOTS, MAX_LEN), *lens)
    for size in (576, 8192):
        rms_norm(tensor(16, size), tensor(size), 1e-6)
        add_rms_norm(tensor(16, size), tensor(16, size), tensor(size), 1e-6)
    silu_and_mul(tensor(16, 2 * 1536))
    for shape in HEADS:
        call_attention(*shape, rotated=min(shape[2], 128), with_norm=shape[2] == 128)
    for num_rows in (1, 4):
        for columns, size, with_norm, gated in LINEAR:
            call_linear(num_rows, columns, size, with_norm, gated)
    skinny_add_linear(tensor(1, 3072), tensor(1024, 3072), tensor(1, 1024), tensor(1024))
    for columns, size, gated in STREAMED:
        call_streamed(columns, size, gated)
    streamed_with_bias(1008, 1000)
    tiled_gated_linear(tensor(8192, 1024), tensor(6144, 1024))
    for shape in TILED:
        call_tiled(*shape)
    for num_rows in (1, 256):
        settings = floats(SLOTS), tensor(SLOTS, dtype=torch.int64), ints(SLOTS), ints(num_rows)
        gumbel_argmax(tensor(num_rows, 151936), *settings, 0, 151936, floats(SLOTS), ints(SLOTS))
    for dtype in (torch.bfloat16, torch.float32):
        settings = floats(SLOTS), ints(SLOTS), floats(SLOTS), floats(SLOTS)
        find_cutoffs(tensor(4, 151936, dtype=dtype), ints(4), *settings)


def call_attention(heads: int, kv_heads: int, head_dim: int, *, rotated: int, with_norm: bool) -> None:
    num_tokens, num_rows = 64, 4
    heads_places = places_of(num_tokens, kv_heads, head_dim, rotated, with_norm)
    query = rotary_and_store(tensor(num_tokens, (heads + 2 * kv_heads) * head_dim), heads_places)
    caches = heads_places.k_cache, heads_places.v_cache
    rows = {
        "block_tables": ints(SLOTS, MAX_LEN // BLOCK_SIZE),
        "row_slots": ints(num_rows),
        "query_start": ints(num_rows + 1),
        "seq_lens": ints(num_rows),
    }
    paged_attention(query, *caches, **rows, scale=0.1)
    # Other GPUs take these for all heads.
    paged_prefill_attention_triton(query, *caches, **rows, scale=0.1, out=query)
    work = plan_decode(rows["query_start"], rows["seq_lens"], kv_heads)
    paged_decode_attention_triton(query, *caches, **rows, scale=0.1, out=query, work=work)


def places_of(num_tokens: int, kv_heads: int, head_dim: int, rotated: int, with_norm: bool) -> HeadPlaces:
    return HeadPlaces(
        q_norm=tensor(head_dim) if with_norm else None,
        k_norm=tensor(head_dim) if with_norm else None,
        eps=1e-6,
        positions=ints(num_tokens),
        cos_sin=floats(MAX_LEN, rotated),
        k_cache=tensor(NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim),
        v_cache=tensor(NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim),
        slot_mapping=tensor(num_tokens, dtype=torch.int64),
    )


def call_tiled(
    num_rows: int, size: int, heads: int, kv_heads: int, head_dim: int, with_norm: bool, with_bias: bool
) -> None:
    x, weight = tensor(num_rows, size), tensor((heads + 2 * kv_heads) * head_dim, size)
    places = places_of(num_rows, kv_heads, head_dim, head_dim, with_norm)
    tiling = heads_tiling(x, weight, places)
    if tiling is None:
        raise RuntimeError(f"a product for {heads} heads of {num_rows} rows is not tiled")
    tiled_heads_linear(x, weight, tensor(weight.shape[0]) if with_bias else None, places, tiling)


def call_linear(num_rows: int, columns: int, size: int, with_norm: bool, gated: bool) -> None:
    skinny_linear(
        tensor(num_rows, size),
        tensor(2 * columns if gated else columns, size),
        residual=tensor(num_rows, size) if with_norm else None,
        norm_weight=tensor(size) if with_norm else None,
        eps=1e-6,
        gated=gated,
    )


def call_streamed(columns: int, size: int, gated: bool) -> None:
    weight = tensor(2 * columns if gated else columns, size)
    exchange = make_exchange(weight.device)
    for bucket, cut in cuts_of(weight, gated=gated).items():
        streamed_linear(tensor(max(bucket - 1, 1), size), weight, Stream(cut, exchange), gated=gated)


def streamed_with_bias(columns: int, size: int) -> None:
    weight = tensor(columns, size)
    stream = Stream(cuts_of(weight)[32], make_exchange(weight.device))
    streamed_linear(tensor(20, size), weight, stream, bias=tensor(columns))


def find_kernels() -> dict[str, JITFunction]:
    """Return every kernel (not the functions kernels call) of the package, by name."""
    kernels: dict[str, JITFunction] = {}
    for module_info in pkgutil.iter_modules(paceline.kernels.__path__):
        module = importlib.import_module(f"paceline.kernels.{module_info.name}")
        kernels.update(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, JITFunction) and name.endswith("_kernel")
        )
    return kernels


def main() -> None:
    driver.set_active(Hopper())
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=MAX_SHARED_BYTES)
    torch.cuda.get_device_properties = lambda device=None: properties
    with compile_only(torch.device("cuda", 0), len(os.sched_getaffinity(0))):
        call_all()  # a kernel that takes more shared memory than there is cannot be loaded
    kernels = find_kernels()
    variants = {name: len(kernel.device_caches[0][0]) for name, kernel in kernels.items()}
    if not all(variants.values()):
        raise RuntimeError(f"no operation that this script calls launches one of {variants}")
    if variants["streamed_kernel"] != STREAMED_VARIANTS:
        raise RuntimeError(f"{variants['streamed_kernel']} variants of streamed products, not {STREAMED_VARIANTS}")
    print(f"Triton {triton.__version__} compiled {len(kernels)} kernels in {sum(variants.values())} variants")


if __name__ == "__main__":
    main()
