"""Every operation can be captured in a CUDA graph: none waits for the GPU or depends on values it holds."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.gumbel_argmax import gumbel_argmax, token_ids_of
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.prepare_inputs import prepare_inputs
from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.rotary import rotary_embedding
from paceline.kernels.silu_and_mul import silu_and_mul
from paceline.kernels.store_kv import store_kv
from paceline.kernels.top_k_top_p import filter_logits


@pytest.mark.gpu
def test_a_replayed_step_equals_the_step_itself() -> None:
    cuda = torch.device("cuda")
    rows, heads, kv_heads, head_dim, vocab = 4, 9, 3, 64, 4096
    query_lens = [1, 1, 20, 30]
    num_tokens = sum(query_lens)
    token_table = torch.randint(vocab, (8, 256), dtype=torch.int32, device=cuda)
    computed_lens = torch.tensor([5, 100, 0, 31, 7, 8, 64, 90], dtype=torch.int32, device=cuda)
    block_tables = torch.randperm(8 * 16, device=cuda).to(torch.int32).view(8, 16)
    slots = torch.tensor([0, 1, 2, 3], device=cuda)
    query_start = torch.tensor([0, *query_lens], device=cuda).cumsum(0).to(torch.int32)
    embedding = torch.randn(vocab, (heads + 2 * kv_heads) * head_dim, device=cuda).to(torch.bfloat16)
    weight = torch.ones(head_dim, device=cuda, dtype=torch.bfloat16)
    cos_sin = torch.randn(512, head_dim, device=cuda)
    k_cache, v_cache = torch.zeros(2, 8 * 16, 16, kv_heads, head_dim, device=cuda, dtype=torch.bfloat16).unbind(0)
    settings, seeds = torch.ones(8, device=cuda), torch.arange(8, device=cuda)
    ones, top_k = torch.ones(rows, device=cuda), torch.full((rows,), 50, dtype=torch.int32, device=cuda)

    def step() -> torch.Tensor:
        ids, positions, slot_mapping = prepare_inputs(
            token_table, computed_lens, block_tables, slots, query_start, num_tokens, 16
        )
        q, k, v = embedding[ids].view(num_tokens, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
        q, k = rotary_embedding(rms_norm(q, weight, 1e-5), rms_norm(k, weight, 1e-5), positions, cos_sin)
        store_kv(k, v, k_cache, v_cache, slot_mapping)
        seq_lens = computed_lens[slots] + query_start[1:] - query_start[:-1]
        attended = paged_attention(
            q, k_cache, v_cache, block_tables=block_tables[slots], seq_lens=seq_lens, query_start=query_start,
            num_decode_rows=2, max_query_len=30, max_seq_len=256, scale=0.125,
        )  # fmt: skip
        hidden = silu_and_mul(torch.cat((attended, q), dim=-1).view(num_tokens * heads, -1))
        hidden, _ = add_rms_norm(hidden, hidden, weight, 1e-5)
        last = hidden.view(num_tokens, -1)[query_start[1:] - 1]
        logits = filter_logits(
            (last @ embedding[:, : heads * head_dim].T).float(), ones, top_k, ones * 0.9, ones * 0.01
        )
        drawn = gumbel_argmax(logits, settings, seeds, computed_lens, slots.to(torch.int32), 0, vocab)
        return token_ids_of(drawn)

    step()  # Compiles the kernels, which a capture may not.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for values in ([3, 2, 1, 0], [7, 6, 5, 4]):
        slots.copy_(torch.tensor(values))
        k_cache.zero_()
        v_cache.zero_()
        graph.replay()
        replayed = captured.clone()
        k_cache.zero_()
        v_cache.zero_()
        assert torch.equal(replayed, step())
