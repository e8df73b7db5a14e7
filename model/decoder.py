"""The decoder that the families share: pre-norm attention and gated MLP over a residual stream.

A family's file says of what its layers are made; see qwen3.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.rotary import rotary_embedding
from paceline.kernels.silu_and_mul import silu_and_mul
from paceline.kernels.store_kv import store_kv
from paceline.model.communicator import Communicator
from paceline.model.config import ModelConfig
from paceline.model.context import StepContext
from paceline.model.embedding import ParallelLMHead, VocabParallelEmbedding
from paceline.model.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from paceline.model.norm import RMSNorm
from paceline.model.rope import cos_sin_table
from paceline.model.shard_plan import ShardPlan


class Attention(nn.Module):
    """Grouped-query attention over the paged cache, on this rank's heads."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        comm: Communicator,
        dtype: torch.dtype,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        shards = ShardPlan(config, comm.size).rank(comm.rank)
        head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, shards.query_heads, shards.kv_heads, head_dim, bias=qkv_bias, dtype=dtype
        )
        self.o_proj = RowParallelLinear(
            shards.query_heads.times(head_dim), config.hidden_size, bias=output_bias, comm=comm, dtype=dtype
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if qk_norm else None
        self._layer_index = layer_index
        self._scale = head_dim**-0.5

    def forward(self, hidden: torch.Tensor, cos_sin: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]; stores the tokens' keys and values in the layer's cache."""
        query, key, value = self.qkv_proj.forward_heads(hidden)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotary_embedding(query, key, ctx.positions, cos_sin)
        key_cache, value_cache = ctx.kv_caches[self._layer_index]
        store_kv(key, value, key_cache, value_cache, ctx.slot_mapping)
        attended = paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables=ctx.block_tables,
            seq_lens=ctx.seq_lens,
            query_start=ctx.query_start,
            num_decode_rows=ctx.num_decode_rows,
            max_query_len=ctx.max_query_len,
            max_seq_len=ctx.max_seq_len,
            scale=self._scale,
        )
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), on this rank's part of the width (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, comm: Communicator, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        width = ShardPlan(config, comm.size).mlp(comm.rank)
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, {"gate": width, "up": width}, bias=bias, dtype=dtype
        )
        self.down_proj = RowParallelLinear(width, config.hidden_size, bias=bias, comm=comm, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = mlp

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the layer before adds to the stream, the stream without it) -> the same of this layer.

        The sum is left to the next norm, which reads and writes the stream once for both.
        """
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, cos_sin, ctx)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class DecoderStack(nn.Module):
    """Embedding, layers and final norm, under the names they have in checkpoints."""

    def __init__(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], norm: RMSNorm, cos_sin: torch.Tensor
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.cos_sin: torch.Tensor
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, input_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T] int64 -> [T, hidden_size]."""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, self.cos_sin, ctx)
        hidden, _ = self.norm.add(hidden, residual)
        return hidden


class CausalLM(nn.Module, ABC):
    """One rank's shard of a language model; parameters stay on the meta device until weights are loaded."""

    merged_modules: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "qkv_proj": {"q": "q_proj", "k": "k_proj", "v": "v_proj"},
        "gate_up_proj": {"gate": "gate_proj", "up": "up_proj"},
    }
    """For each stacked module, the checkpoint's name of each of its shards."""

    ignored_tensors: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    """Endings of checkpoint tensors that are derived from the config and so not needed."""

    def __init__(self, config: ModelConfig, comm: Communicator, dtype: torch.dtype, max_model_len: int) -> None:
        """Raises ModelConfigError where the rope type does not reach max_model_len positions."""
        super().__init__()
        self.config = config
        self.vocab = ShardPlan(config, comm.size).vocab(comm.rank)
        """The ids whose logits this rank computes."""
        embed_tokens = VocabParallelEmbedding(self.vocab, config.hidden_size, comm=comm, dtype=dtype)
        self.model = DecoderStack(
            embed_tokens,
            [self.build_layer(config, index, comm, dtype) for index in range(config.num_hidden_layers)],
            RMSNorm(config.hidden_size, config.rms_norm_eps, dtype),
            cos_sin_table(config, max_model_len),
        )
        self.lm_head = ParallelLMHead(
            self.vocab, config.hidden_size, dtype=dtype, tied_to=embed_tokens if config.tie_word_embeddings else None
        )

    @staticmethod
    @abstractmethod
    def build_layer(config: ModelConfig, index: int, comm: Communicator, dtype: torch.dtype) -> DecoderLayer:
        """The index-th layer of the family."""

    def forward(self, input_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T] int64 token ids -> [T, hidden_size] after the final norm, the same on every rank."""
        hidden: torch.Tensor = self.model(input_ids, ctx)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, hidden_size] -> [S, vocab.padded] of ctx.logits_rows; columns from vocab.length on mean nothing."""
        logits: torch.Tensor = self.lm_head(hidden, ctx.logits_rows)
        return logits
