"""Compile every Triton kernel for sm_90, which needs no GPU; test_compile.py runs this without the interpreter."""

from __future__ import annotations

import importlib
import os
import pkgutil
from concurrent.futures import ProcessPoolExecutor

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

import paceline.kernels
from paceline.kernels.paged_prefill_attention_triton import tile_for

MAX_SHARED_BYTES = 227 * 1024

HALF_BLOCK = f"tensordesc<bf16[16, 64],{gl.NVMMASharedLayout(128, 16, rank=2)!r}>"
# Types of the arguments by name; other pointers are bfloat16.
TYPES = {
    "cos_sin_ptr": "*fp32",
    "log_sums_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "peaks_ptr": "*fp32",
    "masses_ptr": "*fp32",
    "bounds_ptr": "*fp32",
    "candidates_ptr": "*fp32",
    "temperature_ptr": "*fp32",
    "top_p_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "block_tables_ptr": "*i32",
    "chunk_len_ptr": "*i32",
    "chunks_ptr": "*i32",
    "counter_ptr": "*i32",
    "known_lens_ptr": "*i32",
    "row_slots_ptr": "*i32",
    "rows_ptr": "*i32",
    "samples_ptr": "*i32",
    "last_tokens_ptr": "*i64",
    "token_ids_ptr": "*i64",
    "computed_lens_ptr": "*i32",
    "positions_ptr": "*i32",
    "query_start_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "token_table_ptr": "*i32",
    "top_k_ptr": "*i32",
    "input_ids_ptr": "*i64",
    "keys_ptr": "*i64",
    "partial_keys_ptr": "*i64",
    "arrivals_ptr": "*i32",
    "seeds_ptr": "*i64",
    "totals_ptr": "*i64",
    "slot_mapping_ptr": "*i64",
    "slots_ptr": "*i32",
    "k_slots": HALF_BLOCK,
    "v_slots": HALF_BLOCK,
    "eps": "fp32",
    "scale_log2": "fp32",
}
INTEGERS = (
    "num_rows", "num_tokens", "num_columns", "outer_stride", "size", "width", "vocab_start", "vocab_valid",
    "block_table_width", "token_table_width", "num_slots", "tiles",
)  # fmt: skip

ATTENTION = {"BLOCK_SIZE": 16, "BLOCK_N": 64, "UPCAST": False}
HEADS = (
    {"GROUP": 3, "KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK_D": 64},
    {"GROUP": 1, "KV_HEADS": 32, "HEAD_DIM": 80, "BLOCK_D": 128},
    {"GROUP": 4, "KV_HEADS": 8, "HEAD_DIM": 256, "BLOCK_D": 256},
)
ROTARY = {"Q_HEADS": 9, "KV_HEADS": 3, "HEAD_DIM": 80, "BLOCK_HEADS": 8, "PDL": True, "num_warps": 4}
DECODE = {"COMBINED": 8, "PDL": True, "num_warps": 4, "num_stages": 3}
SKINNY = {"BLOCK_M": 8, "BLOCK_N": 16, "SLICES": 4, "SLICE": 256, "UPCAST": False, "num_warps": 4}
PLAIN = {"NORM": False, "RESIDUAL": False, "GATED": False, "BIAS": False, "PDL": True}
EXTRAS = {"NORM": True, "RESIDUAL": True, "GATED": True, "BIAS": False, "PDL": True}
# The constexpr arguments of each kernel, once or more, and the options its launch function passes.
VARIANTS: dict[str, list[dict[str, int]]] = {
    "_rms_norm_kernel": [
        {"SIZE": 576, "BLOCK_ROWS": 1, "BLOCK": 1024, "RESIDUAL": False, "PDL": True, "num_warps": 2},
        {"SIZE": 8192, "BLOCK_ROWS": 1, "BLOCK": 8192, "RESIDUAL": True, "PDL": True, "num_warps": 16},
    ],
    "_silu_and_mul_kernel": [{"SIZE": 1536, "BLOCK": 1024, "PDL": True, "num_warps": 4}],
    "_rotary_and_store_kernel": [
        {**ROTARY, "HALF": 40, "BLOCK_HALF": 64, "BLOCK_REST": 0, "NORM": False},
        {**ROTARY, "HALF": 16, "BLOCK_HALF": 16, "BLOCK_REST": 64, "NORM": True},
    ],
    "_prepare_inputs_kernel": [{"BLOCK_SIZE": 16, "BLOCK": 64, "num_warps": 4}],
    "_advance_rows_kernel": [{"BLOCK": 128, "num_warps": 4}],
    "_plan_decode_kernel": [
        {"KV_HEADS": 3, "PROGRAMS": 528, "MIN_CHUNK": 128, "BLOCK_N": 64, "BLOCK_R": 256, "BLOCK": 64, "num_warps": 4}
    ],
    "decode_kernel": [{**ATTENTION, **heads, "BLOCK_M": 16, "BLOCK_G": 4, **DECODE} for heads in HEADS],
    "_row_kernel": [
        {**EXTRAS, "SIZE": 1024, "BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 4},
        {**EXTRAS, "SIZE": 12288, "BLOCK_N": 4, "BLOCK_K": 4096, "num_warps": 8},
    ],
    "_skinny_kernel": [
        {**EXTRAS, **SKINNY, "SIZE": 1024},
        {**PLAIN, **SKINNY, "SIZE": 3072, "SLICES": 8, "num_warps": 8},
    ],
    "_prefill_kernel": [
        {
            **heads, "BLOCK_SIZE": 16, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "OVERLAP": tile.overlap,
            "WIDE": wide, "UPCAST": False, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
        }
        for heads, wide in zip(HEADS, (False, True, False), strict=True)
        for tile in [tile_for(heads["HEAD_DIM"], 2)]
    ],
    "_hopper_prefill_kernel": [
        {"GROUP": 2, "KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_N": 128, "STAGES": 2, "num_warps": 4}
        for head_dim in (64, 128)
    ],
    "_gumbel_argmax_kernel": [
        {"BLOCK": 1024, "STEPS": steps, "TILES": tiles, "ON_GPU": True, "num_warps": 4}
        for steps, tiles in ((1, 256), (16, 16))
    ],
    "survey_kernel": [{"TILE": 4096, "num_warps": 8}],
    "interval_kernel": [{"TILES": 64, "CAPACITY": 16384, "SAMPLE": 8192, "num_warps": 16}],
    "collect_kernel": [{"TILE": 2048, "CAPACITY": 16384, "num_warps": 8}],
    "search_kernel": [{"BLOCK": 1024, "CAPACITY": 16384, "num_warps": 8}],
    "apply_kernel": [{"TILE": 4096, "num_warps": 8}],
}  # fmt: skip


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


def compile_variant(kernel: JITFunction, variant: dict[str, int]) -> None:
    """Compile one kernel; raises if it does not compile or asks for more shared memory than sm_90 has."""
    options = {name: value for name, value in variant.items() if name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in variant.items() if name not in options}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS:
            signature[name] = "i32"
        else:
            signature[name] = TYPES.get(name, "*bf16")
    # The filters work on float32 logits alone.
    if "min_p_ptr" in kernel.arg_names:
        signature["logits_ptr"] = "*fp32"
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = compile(
        source(fn=kernel, signature=signature, constexprs=constants), GPUTarget("cuda", 90, 32), options=options
    )
    if compiled.metadata.shared > MAX_SHARED_BYTES:
        raise RuntimeError(f"{kernel.__name__} {variant} needs {compiled.metadata.shared} bytes of shared memory")


def compile_named(name: str, variant: dict[str, int]) -> None:
    """`compile_variant` in a process of its own."""
    compile_variant(find_kernels()[name], variant)


def main() -> None:
    kernels = find_kernels()
    if kernels.keys() != VARIANTS.keys():
        raise RuntimeError(f"kernels without a variant here, or the reverse: {kernels.keys() ^ VARIANTS.keys()}")
    work = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]
    with ProcessPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(compile_named, *zip(*work, strict=True)))
    print(f"compiled {len(kernels)} kernels")


if __name__ == "__main__":
    main()
