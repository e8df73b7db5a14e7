"""Compile every Triton kernel for sm_90, which needs no GPU; test_compile.py runs this without the interpreter."""

from __future__ import annotations

import importlib
import pkgutil

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

import paceline.kernels

MAX_SHARED_BYTES = 227 * 1024

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
    "slots_ptr": "*i64",
    "eps": "fp32",
    "scale_log2": "fp32",
}
INTEGERS = (
    "num_rows", "num_tokens", "outer_stride", "inner_stride", "q_stride", "k_stride", "v_stride", "width",
    "vocab_start", "vocab_valid", "block_table_width", "token_table_width", "tiles",
)  # fmt: skip

ATTENTION = {"BLOCK_SIZE": 16, "BLOCK_N": 64, "UPCAST": False}
HEADS = (
    {"GROUP": 3, "KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK_D": 64},
    {"GROUP": 1, "KV_HEADS": 32, "HEAD_DIM": 80, "BLOCK_D": 128},
    {"GROUP": 4, "KV_HEADS": 8, "HEAD_DIM": 256, "BLOCK_D": 256},
)
ROTARY = {"Q_HEADS": 9, "K_HEADS": 3, "BLOCK_Q_HEADS": 16, "BLOCK_K_HEADS": 4, "HEAD_DIM": 80}
# The constexpr arguments of each kernel, once or more, and the options its launch function passes.
VARIANTS: dict[str, list[dict[str, int]]] = {
    "_rms_norm_kernel": [
        {"INNER": 9, "SIZE": 80, "BLOCK_ROWS": 8, "BLOCK": 128, "num_warps": 2},
        {"INNER": 1, "SIZE": 8192, "BLOCK_ROWS": 1, "BLOCK": 8192, "num_warps": 16},
    ],
    "_add_rms_norm_kernel": [{"SIZE": 576, "BLOCK_ROWS": 1, "BLOCK": 1024, "num_warps": 2}],
    "_silu_and_mul_kernel": [{"SIZE": 1536, "BLOCK": 1024, "num_warps": 4}],
    "_rotary_kernel": [
        {**ROTARY, "HALF": 40, "BLOCK_HALF": 64, "BLOCK_REST": 0, "num_warps": 4},
        {**ROTARY, "HALF": 16, "BLOCK_HALF": 16, "BLOCK_REST": 64, "num_warps": 4},
    ],
    "_store_kv_kernel": [{"SIZE": 192, "BLOCK": 256, "num_warps": 4}],
    "_prepare_inputs_kernel": [{"BLOCK_SIZE": 16, "BLOCK": 64, "num_warps": 4}],
    "_decode_kernel": [
        {**ATTENTION, **heads, "BLOCK_M": 16, "SPLITS": splits, "num_warps": 4, "num_stages": 3}
        for heads, splits in zip(HEADS, (1, 8, 1), strict=True)
    ],
    "_combine_kernel": [{"NUM_HEADS": 9, "HEAD_DIM": 80, "BLOCK_D": 128, "SPLITS": 8, "num_warps": 4}],
    "_prefill_kernel": [{**ATTENTION, **heads, "BLOCK_M": 64, "num_warps": 4, "num_stages": 3} for heads in HEADS],
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
    compiled = compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants), GPUTarget("cuda", 90, 32), options=options
    )
    if compiled.metadata.shared > MAX_SHARED_BYTES:
        raise RuntimeError(f"{kernel.__name__} {variant} needs {compiled.metadata.shared} bytes of shared memory")


def main() -> None:
    kernels = find_kernels()
    if kernels.keys() != VARIANTS.keys():
        raise RuntimeError(f"kernels without a variant here, or the reverse: {kernels.keys() ^ VARIANTS.keys()}")
    for name, variants in VARIANTS.items():
        for variant in variants:
            compile_variant(kernels[name], variant)
    print(f"compiled {len(kernels)} kernels")


if __name__ == "__main__":
    main()
