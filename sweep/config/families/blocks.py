"""Makes the blocks of layers from keys of a config.json, as the families of models share them."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ultrabench.model_shape import RopeScaling
from ultrabench.record import field_types
from ultrabench.sweep.config.families.keys import ConfigKeys
from ultrabench.sweep.config.model_types import ROPE_KEYS

Block = dict[str, Any]
"""The fields of an attention, of a feed-forward block, or of a type of layer."""
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def grouped_query(keys: ConfigKeys, rotation: Block, **words: Any) -> Block:
    """Grouped-query attention with the usual keys of its sizes."""
    num_heads = keys.count("num_attention_heads")
    head_dim = keys.get("head_dim", "attention_head_dim") or keys.count("hidden_size") // max(1, num_heads)
    sizes = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.get("num_key_value_heads", default=num_heads),
        "head_dim": head_dim,
        "rope_theta": rotation["rope_theta"],
        "partial_rotary_factor": rotation["partial_rotary_factor"],
    }
    return {"grouped_query": sizes | words}


def latent(keys: ConfigKeys, rotation: Block, *, has_index: bool = False) -> Block:
    """Multi-head latent attention, with the index of sparse attention where a model has one."""
    names = "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    index_names = "index_n_heads", "index_head_dim", "index_topk"
    index = {name: keys.size(name) for name in index_names} if has_index else None
    keys.unused(
        "num_key_value_heads", "head_dim", "qk_head_dim", "rope_interleave", "indexer_rope_interleave"
    )
    return {"latent": {
        **{name: keys.size(name) for name in names}, "q_lora_rank": keys.get("q_lora_rank"), "index": index,
        "attention_bias": keys.get("attention_bias", default=False), "rope_theta": rotation["rope_theta"],
    }}  # fmt: skip


def gated_delta(keys: ConfigKeys) -> Block:
    """Linear attention by the gated delta rule."""
    names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    kernel_size = keys.get("linear_conv_kernel_dim", default=4)
    return {"linear": {**{name: keys.size(name) for name in names}, "linear_conv_kernel_dim": kernel_size}}


def dense(keys: ConfigKeys, *names: str, **words: Any) -> Block:
    """A feed-forward block; `names` are the keys of its width."""
    width = keys.size(*(names or ("intermediate_size",)))
    return {
        "feed_forward": {"intermediate_size": width, "hidden_act": keys.activation("hidden_act"), **words}
    }


def routed(keys: ConfigKeys, *, width: int, **words: Any) -> Block:
    """A router and experts of this width."""
    num_names, top_names = ("n_routed_experts", "num_local_experts", "num_experts"), ("num_experts_per_tok",)
    sizes = {"num_experts": keys.size(*num_names), "num_experts_per_tok": keys.size(*top_names)}
    return {
        "experts": {
            **sizes,
            "moe_intermediate_size": width,
            "hidden_act": keys.activation("hidden_act"),
            **words,
        }
    }


def layers_of(
    keys: ConfigKeys, num_layers: int, type_of: Callable[[int], Block], key_of: Callable[[int], Hashable]
) -> Block:
    """`layer_types` and `layer_order` of a model.

    Args:
        type_of: gives the type of a layer by its number.
        key_of: gives what decides the type of a layer.
    """
    numbers = range(num_layers)
    first_by_key = {key: n for n, key in reversed([(n, key_of(n)) for n in numbers])}
    letter_by_key = {
        key: _LETTERS[i] for i, key in enumerate(sorted(first_by_key, key=first_by_key.__getitem__))
    }
    order = "".join(letter_by_key[key_of(n)] for n in numbers)
    types = [type_of(first_by_key[key]) for key in letter_by_key]
    return {"layer_types": types, "layer_order": short_order(order)}


def short_order(order: str) -> str:
    """An order of layers with the part that repeats in parentheses, after the shortest part that does not repeat."""
    for start in range(len(order)):
        rest = order[start:]
        for period in range(1, len(rest) // 2 + 1):
            if all(letter == rest[i % period] for i, letter in enumerate(rest)):
                return f"{order[:start]}({rest[:period]})"
        if start >= len(order) // 2:
            break
    return order


def words_of_layers(
    keys: ConfigKeys, names: Sequence[str], num_layers: int, default: Callable[[int], str]
) -> list[str]:
    """A word for each layer, from a key that lists them or from the rule of models without that key."""
    words = keys.words(*names) or [default(n) for n in range(num_layers)]
    if len(words) < num_layers:
        keys.refuse(names[0], f"with at least num_hidden_layers={num_layers} entries")
    return words[:num_layers]


def rotation_fields(rotation: Block) -> Block:
    """The fields of a shape that say how its rotations are stretched.

    A rotation of another kind, or with keys beside those of a RopeScaling, is only named, so that no kernel trains it.
    """
    given = {key: value for key, value in rotation.items() if value is not None and key not in ROPE_KEYS}
    is_known = given.keys() <= field_types(RopeScaling).keys() | _UNUSED_ROPE_KEYS
    sizes = {key: value for key, value in given.items() if key in field_types(RopeScaling)}
    if rotation["rope_type"] == "llama3" and sizes.get("low_freq_factor") != sizes.get("high_freq_factor"):
        return {"rope_scaling": {"rope_type": "llama3", **{k: sizes[k] for k in _LLAMA3_KEYS if k in sizes}}}
    has_sizes = {"factor", "original_max_position_embeddings"} <= sizes.keys()
    if rotation["rope_type"] == "yarn" and is_known and has_sizes:
        return {"rope_scaling": {"rope_type": "yarn", **sizes}}
    return {"rope_type": rotation["rope_type"]}


_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys that rotations of llama3 read."""
_UNUSED_ROPE_KEYS = {"max_position_embeddings", "finetuned"}
"""Keys of rotations that change nothing in training."""
