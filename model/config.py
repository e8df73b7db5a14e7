"""What a checkpoint's config.json says of its model, checked before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.model.json_fields import MAX_SIZE, JsonFields, merge_spellings, read_json_object, shown
from paceline.model.quantization import refuse_quantization_files, refuse_quantized
from paceline.model.rope_config import RopeConfig

DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 1024
"""Several times what the deepest models have; to build as many takes a rank about a second, before any file is read."""
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class FamilyDefaults:
    """What a field stands for where a family's config.json leaves it out, as in transformers' config classes."""

    max_position_embeddings: int
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""


FAMILIES: Mapping[str, FamilyDefaults] = {
    "LlamaForCausalLM": FamilyDefaults(max_position_embeddings=2048),
    "Qwen2ForCausalLM": FamilyDefaults(max_position_embeddings=32768),
    "Qwen3ForCausalLM": FamilyDefaults(max_position_embeddings=32768, head_dim=128),
}
"""By the name in a config's `architectures`; paceline.model.registry has the class of each."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder; the fields bear the names they have in config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """One of DTYPES; a config that names none is float32."""
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    """Ids that end a text, from config.json and generation_config.json."""

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Read the config.json, and the generation_config.json where there is one, of a checkpoint folder.

        Raises ModelConfigError, which names the file and the field, for anything absent, damaged or not supported,
        files that tell of a quantisation among it.
        """
        folder = Path(folder)
        generation = folder / GENERATION_CONFIG
        config = cls.from_dict(
            read_json_object(folder / "config.json"),
            read_json_object(generation) if generation.exists() else {},
            where=str(folder / "config.json"),
        )
        refuse_quantization_files(folder)
        return config

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, where: str = "config.json"
    ) -> ModelConfig:
        """The same of parsed contents; `where`, the name of config.json, begins the message of an error.

        Sizes reach to MAX_SIZE, that of all heads together too; layers to MAX_LAYERS; other numbers from MIN_NUMBER to
        MAX_NUMBER (paceline.model.json_fields).
        """
        fields = JsonFields(config, where)
        architecture = _architecture(fields)
        defaults = FAMILIES[architecture]
        _refuse_unsupported(fields)
        heads = fields.size("num_attention_heads")
        # transformers' Qwen classes stand 32 for an absent value, which suits only models of 32 heads: as many as
        # there are query heads says the same for those and is right for others.
        kv_heads = fields.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise fields.error(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        hidden_size = fields.size("hidden_size")
        max_positions = fields.size("max_position_embeddings", defaults.max_position_embeddings)
        rope = RopeConfig.from_config(config, where=where)
        vocab_size = fields.size("vocab_size")
        generation_fields = JsonFields(generation or {}, str(Path(where).with_name(GENERATION_CONFIG)))
        eos = [id_ for each in (fields, generation_fields) for id_ in each.token_ids("eos_token_id", vocab_size)]
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=_num_layers(fields),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=_head_dim(fields, defaults, rope, hidden_size, heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            dtype=_dtype(fields, where),
            rope=rope,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )


def _architecture(fields: JsonFields) -> str:
    """The one entry of `architectures`, where it is supported."""
    names = fields.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error(f"architectures must hold one of {known}, got {shown(names)}")
    name: str = names[0]
    if name not in FAMILIES:
        raise fields.error(f"architecture {shown(name)} is not supported; {known} are")
    return name


def _refuse_unsupported(fields: JsonFields) -> None:
    """Refuse what would change the computation and is not implemented."""
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error(f"hidden_act: activation {shown(activation)} is not supported; only silu is")
    refuse_quantized(fields)
    if fields.flag("use_sliding_window", False):
        raise fields.error("use_sliding_window is not supported; only full attention is")
    layer_types = fields.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * _num_layers(fields):
        raise fields.error(f"layer_types must be full_attention for every layer, got {shown(layer_types)}")


def _num_layers(fields: JsonFields) -> int:
    return fields.size("num_hidden_layers", most=MAX_LAYERS)


def _head_dim(fields: JsonFields, defaults: FamilyDefaults, rope: RopeConfig, hidden_size: int, heads: int) -> int:
    """Elements of one head; even, since rotary embedding turns them in pairs."""
    if fields.get("head_dim") is None and defaults.head_dim is None and hidden_size % heads:
        raise fields.error(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({heads})")
    head_dim = fields.size("head_dim", defaults.head_dim or hidden_size // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim must be even, got {head_dim}")
    if rope.rope_type == "dynamic" and head_dim == 2:  # its formula divides by what there is beyond 2
        raise fields.error("head_dim must be above 2 where the rope type is dynamic, got 2")
    if heads * head_dim > MAX_SIZE:
        raise fields.error(f"num_attention_heads ({heads}) times head_dim ({head_dim}) must be at most {MAX_SIZE}")
    return head_dim


def _dtype(fields: JsonFields, where: str) -> str:
    """The type the weights are meant for: `dtype`, in older files `torch_dtype`."""
    spellings = merge_spellings(where, {"dtype": fields.get("torch_dtype")}, {"dtype": fields.get("dtype")})
    name = spellings.get("dtype", "float32")
    if name not in DTYPES:
        raise fields.error(f"dtype {shown(name)} is not supported; {', '.join(DTYPES)} are")
    return str(name)
