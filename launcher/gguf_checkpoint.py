"""Writing a Llama model of the GGUF format as an ordinary Hugging Face checkpoint folder.

Weights are dequantised and rounded to bfloat16; the tokenizer is rebuilt from the vocabulary and merges in the file.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.coordinator.errors import InputError

_TOP_LEVEL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3
"""Token type of the format for tokens such as <|im_end|>, which text never produces."""


class GgufModel:
    """The metadata and weights of one GGUF file, opened without reading the weights."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for what is not a tied Llama model with a byte-level tokenizer."""
        self._reader = GGUFReader(path)
        for key, wanted in (
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ):
            if (found := self.field(key)) != wanted:
                raise InputError(f"{path.name}: {key} is {found!r}, and only {wanted!r} can be converted")
        if any(tensor.name == "output.weight" for tensor in self._reader.tensors):
            raise InputError(f"{path.name}: only models whose output weight is the embedding can be converted")

    def field(self, key: str) -> Any:
        """One metadata value as plain Python. Raises InputError where the file lacks it."""
        field = self._reader.get_field(key)
        if field is None:
            raise InputError(f"the GGUF file has no {key}")
        return field.contents()

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        hidden_size = self.field("llama.embedding_length")
        num_heads = self.field("llama.attention.head_count")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "num_hidden_layers": self.field("llama.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.field("llama.attention.head_count_kv"),
            "head_dim": hidden_size // num_heads,
            "max_position_embeddings": self.field("llama.context_length"),
            "rope_theta": self.field("llama.rope.freq_base"),
            # The file holds a float32: 9.999999747e-06 means 1e-05.
            "rms_norm_eps": round(self.field("llama.attention.layer_norm_rms_epsilon"), 9),
            "vocab_size": self.field("llama.vocab_size"),
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            **self.special_ids(),
        }

    def special_ids(self) -> dict[str, int]:
        """Ids of the tokens that start, end and pad a text, under the names that both configs use."""
        return {
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
        }

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer; each digit is a token of its own."""
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types: list[int] = self.field("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == _CONTROL_TOKEN
            ]
        )
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json, the chat template among them."""
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[self.field("tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[self.field("tokenizer.ggml.eos_token_id")],
            "pad_token": tokens[self.field("tokenizer.ggml.padding_token_id")],
            "unk_token": tokens[self.field("tokenizer.ggml.unknown_token_id")],
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.field("llama.context_length"),
            "chat_template": self.field("tokenizer.chat_template"),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Every weight by its Hugging Face name, dequantised, bfloat16."""
        num_heads = {
            "attn_q": self.field("llama.attention.head_count"),
            "attn_k": self.field("llama.attention.head_count_kv"),
        }
        weights = {}
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            kind = tensor.name.split(".")[-2]
            if kind in num_heads:
                values = split_rotary_halves(values, num_heads[kind])
            weights[checkpoint_name(tensor.name)] = torch.tensor(values, dtype=torch.bfloat16)
        return weights


def checkpoint_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight.

    Raises InputError for a tensor that a Llama model does not have.
    """
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
    raise InputError(f"the GGUF file has a tensor {gguf_name!r} that a Llama model does not have")


def split_rotary_halves(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of a query or key projection from GGUF's rotary layout to Hugging Face's.

    GGUF stores each head's rotated pairs side by side (0, 1), (2, 3), …; Hugging Face rotates row i with row
    i + head_dim / 2. weight: [num_heads * head_dim, hidden], and so is the result.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, hidden)


def convert(gguf_file: Path, folder: Path) -> None:
    """Write weights, configs and tokenizer into an existing folder.

    Raises InputError for a model that cannot be converted.
    """
    model = GgufModel(gguf_file)
    save_file(model.weights(), folder / "model.safetensors", metadata={"format": "pt"})
    model.tokenizer().save(str(folder / "tokenizer.json"))
    for name, contents in (
        ("config.json", model.config()),
        ("generation_config.json", model.special_ids()),
        ("tokenizer_config.json", model.tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
