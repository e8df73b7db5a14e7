"""The decoder that the families share: pre-norm attention and gated MLP over a residual stream.

A family's file says of what its layers are made; see qwen3.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar

import torch
from torch import nn

from paceline.kernels.linear import Addend
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.rotary_and_store import HeadPlaces
from paceline.model.communicator import Communicator
from paceline.model.config import ModelConfig
from paceline.model.context import StepContext
from paceline.model.embedding import ParallelLMHead, VocabParallelEmbedding
from paceline.model.linear import GatedColumnParallelLinear, NextNorm, QKVParallelLinear, RowParallelLinear
from paceline.model.norm import RMSNorm
from paceline.model.rope import check_max_model_len, cos_sin_table
from paceline.model.shard_plan import ShardPlan

Hidden = tuple[torch.Tensor, torch.Tensor | None]
"""Two parts of the residual stream after the last layer, [N, hidden_size] each; None counts as zero."""

Products = tuple[RowParallelLinear, GatedColumnParallelLinear, RowParallelLinear, QKVParallelLinear]
"""A layer's matrix products."""


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

    def forward(
        self,
        norm: RMSNorm,
        hidden: Addend,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor,
        ctx: StepContext,
        following: NextNorm,
    ) -> tuple[Addend, torch.Tensor | None]:
        """(attention of norm(hidden + residual), hidden + residual) for the product that follows.

        Stores the tokens' keys and values in the layer's cache.
        """
        key_cache, value_cache = ctx.kv_caches[self._layer_index]
        heads = HeadPlaces(
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=norm.eps,
            positions=ctx.positions,
            cos_sin=cos_sin,
            k_cache=key_cache,
            v_cache=value_cache,
            slot_mapping=ctx.slot_mapping,
        )
        query, total = self.qkv_proj.to_heads(norm, hidden, residual, heads)
        attended = paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables=ctx.block_tables,
            row_slots=ctx.row_slots,
            query_start=ctx.query_start,
            seq_lens=ctx.seq_lens,
            scale=self._scale,
            has_prefills=ctx.has_prefills,
            has_decodes=ctx.has_decodes,
            decode_work=ctx.decode_work,
            prefill_counter=ctx.prefill_counter,
        )
        return self.o_proj.add(attended.flatten(1), total, following)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), on this rank's part of the width (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, comm: Communicator, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        width = ShardPlan(config, comm.size).mlp(comm.rank)
        self.gate_up_proj = GatedColumnParallelLinear(config.hidden_size, width, bias=bias, dtype=dtype)
        self.down_proj = RowParallelLinear(width, config.hidden_size, bias=bias, comm=comm, dtype=dtype)

    def forward(
        self, norm: RMSNorm, hidden: Addend, residual: torch.Tensor | None, following: NextNorm | None
    ) -> tuple[Addend, torch.Tensor | None]:
        """(the MLP of norm(hidden + residual), hidden + residual) for the product that follows, if one does."""
        gated, total = self.gate_up_proj(norm, hidden, residual)
        return self.down_proj.add(gated, total, following)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = mlp

    @property
    def entry(self) -> NextNorm:
        """What this layer begins with."""
        return NextNorm(self.input_layernorm, self.self_attn.qkv_proj.streams)

    @property
    def products(self) -> Products:
        """In the order of a step, from attention's result on; the last is the first of the next layer there."""
        return self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj, self.self_attn.qkv_proj

    def forward(
        self,
        hidden: Addend,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor,
        ctx: StepContext,
        following: NextNorm | None,
    ) -> tuple[Addend, torch.Tensor | None]:
        """(what the layer before adds to the stream, the stream without it) -> the same of this layer.

        The sum is for the next norm, which has to read both anyway, or for the product before that, which is told
        what follows. After the last layer nothing does: it gives two tensors, [T, hidden_size].
        """
        middle = NextNorm(self.post_attention_layernorm, self.mlp.gate_up_proj.streams)
        hidden, residual = self.self_attn(self.input_layernorm, hidden, residual, cos_sin, ctx, middle)
        out: tuple[Addend, torch.Tensor | None] = self.mlp(self.post_attention_layernorm, hidden, residual, following)
        return out


class DecoderStack(nn.Module):
    """Embedding, layers and final norm, under the names they have in checkpoints."""

    def __init__(self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], norm: RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.cos_sin: torch.Tensor
        self.register_buffer("cos_sin", None, persistent=False)

    def forward(self, input_ids: torch.Tensor, ctx: StepContext) -> Hidden:
        """[T] int64 -> the residual stream of all T tokens."""
        hidden: Addend = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer, following in pairwise(self.layers):
            hidden, residual = layer(hidden, residual, self.cos_sin, ctx, following.entry)
        out: Hidden = self.layers[-1](hidden, residual, self.cos_sin, ctx, None)
        return out


class CausalLM(nn.Module, ABC):
    """One rank's shard of a language model; parameters stay on the meta device until weights are loaded.

    Before it can run, `place_table` is called.
    """

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
        check_max_model_len(config, max_model_len)
        self.config = config
        self.vocab = ShardPlan(config, comm.size).vocab(comm.rank)
        """The ids whose logits this rank computes."""
        # Beside all else until `place_table`: torch first begins threads for it, on a busy host for 0.1 s.
        thread = ThreadPoolExecutor(1, thread_name_prefix="cos-sin-table")
        self._cos_sin = thread.submit(cos_sin_table, config, max_model_len)
        thread.shutdown(wait=False)
        embed_tokens = VocabParallelEmbedding(self.vocab, config.hidden_size, comm=comm, dtype=dtype)
        layers = [self.build_layer(config, index, comm, dtype) for index in range(config.num_hidden_layers)]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.model = DecoderStack(embed_tokens, layers, norm)
        self.lm_head = ParallelLMHead(
            self.vocab, config.hidden_size, dtype=dtype, tied_to=embed_tokens if config.tie_word_embeddings else None
        )

    @staticmethod
    @abstractmethod
    def build_layer(config: ModelConfig, index: int, comm: Communicator, dtype: torch.dtype) -> DecoderLayer:
        """The index-th layer of the family."""

    def place_table(self, device: torch.device) -> None:
        """Put the table of cosines and sines on a device: once, after the weights and before the first forward."""
        self.model.cos_sin = self._cos_sin.result().to(device)
        del self._cos_sin

    def forward(self, input_ids: torch.Tensor, ctx: StepContext) -> Hidden:
        """[T] int64 token ids -> what `logits` takes, of ctx.logits_tokens."""
        hidden, residual = self.model(input_ids, ctx)
        if ctx.logits_tokens is not None:
            hidden = hidden.index_select(0, ctx.logits_tokens)
            residual = None if residual is None else residual.index_select(0, ctx.logits_tokens)
        return hidden, residual

    @contextmanager
    def two_layers(self) -> Iterator[None]:
        """Within, the model has its first two layers alone, which launch every kernel that all launch.

        The first is given no residual stream; those after the second differ from it in their weights only.
        """
        layers = self.model.layers
        self.model.layers = layers[:2]
        try:
            yield
        finally:
            self.model.layers = layers

    def logits(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """[N, vocab.padded] on this rank's part of the vocabulary; columns from vocab.length on mean nothing."""
        logits: torch.Tensor = self.lm_head(self.model.norm, hidden, residual)
        return logits
