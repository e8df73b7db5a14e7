"""Gumbel noise of every token, from a counter-based generator: a pure function of (request seed, position, token id).

So a seeded request draws the same tokens whatever its batch, the number of ranks or the order of steps. A 64-bit row
key comes from seed and position by the finaliser of SplitMix64 (Steele et al., OOPSLA 2014). A token's 32 bits come
from its id by three keyed folded products, of which wyhash is made (https://github.com/wangyi-fudan/wyhash): the
exclusive or of the two halves of a 64-bit product, two instructions each, where hashes by shifts take more. Two of
the multipliers are those of Philox (Salmon et al., SC 2011), the other is the golden ratio.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LOW_HALF = 2**32 - 1


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the standard Gumbel noise of every row and token: [S, N] float32.

    seeds: [S] int64. positions: [S] int32 or int64. token_ids: [N] int32 or int64.
    """
    row_key = _mix64(_mix64(seeds) + positions.long() * _signed64(0x9E3779B97F4A7C15)).unsqueeze(1)
    low, high = row_key & _LOW_HALF, (row_key >> 32) & _LOW_HALF
    bits = ((token_ids.long() + low) & _LOW_HALF).mul_(0x9E3779B9)
    bits = _fold_(bits, high).mul_(0xD2511F53)
    bits = _fold_(bits, low).mul_(0xCD9E8D57)
    # Large noise, which decides, comes of small v, where float32 is finest. The factor keeps v below 1, which would
    # give -inf, and the addend above 0.
    v = _fold_(bits, 0).to(torch.float32).mul_(2.0**-32 - 2.0**-56).add_(2.0**-33)
    exponential = v.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _fold_(products: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """Return the exclusive or of both halves of int64 products and of a 32-bit key, in place: int64 below 2**32."""
    return products.bitwise_xor_(products >> 32).bitwise_xor_(key).bitwise_and_(_LOW_HALF)


def _signed64(constant: int) -> int:
    """Return an unsigned 64-bit constant as the signed integer of the same bits: torch's products need those."""
    return constant - (1 << 64) if constant >> 63 else constant


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser of int64 x; the masks make arithmetic shifts logical."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed64(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed64(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


@triton.jit
def row_key_triton(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the uint64 key of a row's noise."""
    return _mix64_triton(_mix64_triton(seed.to(tl.uint64)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def log2_exponential_triton(counters: tl.tensor, low: tl.tensor, high: tl.tensor, ON_GPU: tl.constexpr) -> tl.tensor:
    """Return `gumbel_noise` of one row, to about 2e-6, divided by -ln 2.

    counters: uint32, the token ids plus low. low, high: uint32, the halves of the row's key. ON_GPU: use the GPU's own
    instructions, which the interpreter lacks.
    """
    bits = _fold(counters, 0x9E3779B9, ON_GPU) ^ high
    bits = _fold(_fold(bits, 0xD2511F53, ON_GPU) ^ low, 0xCD9E8D57, ON_GPU)
    v = bits.to(tl.float32) * (2.0**-32 - 2.0**-56) + 2.0**-33
    # -log(1 - v): 1 - v loses the digits of a small v, which a polynomial keeps (minimax, relative error 7e-7).
    small = v * (1.0 + v * (0.5000912 + v * (0.32904473 + v * 0.3060936)))
    return _log2(tl.where(v < 0.125, small, -0.6931471805599453 * _log2(1.0 - v, ON_GPU)), ON_GPU)


@triton.jit
def _log2(x: tl.tensor, ON_GPU: tl.constexpr) -> tl.tensor:
    """log2 of float32 x that is not subnormal, by the GPU's own instruction where there is one.

    Its absolute error is 2**-22 in 0.5 to 2, its relative error that elsewhere (PTX ISA, lg2.approx).
    """
    if ON_GPU:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def _fold(x: tl.tensor, multiplier: tl.constexpr, ON_GPU: tl.constexpr) -> tl.tensor:
    """Return the exclusive or of both halves of the 64-bit product of uint32 x and a 32-bit constant.

    Written out for the GPU because the compiler otherwise takes the product for one of two 64-bit numbers.
    """
    if ON_GPU:
        folded = tl.inline_asm_elementwise(
            """{
            .reg .b64 product;
            .reg .b32 low, high;
            mul.wide.u32 product, $1, $2;
            mov.b64 {low, high}, product;
            xor.b32 $0, low, high;
            }""",
            "=r,r,r",
            [x, multiplier],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        product = x.to(tl.uint64) * multiplier
        folded = product.to(tl.uint32) ^ (product >> 32).to(tl.uint32)
    return folded


@triton.jit
def _mix64_triton(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
