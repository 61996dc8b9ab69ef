"""The parts of layers that a program computes again in backward, by the names of Megatron-LM's --recompute-modules.

The knob `recompute_modules` of a run lists them; https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer, has
what each of them keeps.
"""

from ultrabench.layer_products import COLUMNS
from ultrabench.layer_type import LayerType
from ultrabench.run import RunSpec

KNOB = "recompute_modules"
"""Name of the knob; its value is a text such as `layernorm+moe_act`."""
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""The parts that have a name. Flash attention keeps nothing that core_attn could leave out."""


def modules_of(spec: RunSpec) -> frozenset[str]:
    """The parts of layers that backward of a run computes again, beside the recomputation of its layout."""
    text = spec.flag_values.get(KNOB) if spec.variant or spec.kernel.knobs else None
    return frozenset(MODULES).intersection(str(text).split("+")) if text else frozenset()


def dropped_numbers(kind: LayerType, h: int, modules: frozenset[str], tp: int) -> float:
    """Numbers of each of a rank's tokens that a layer does not keep because these parts are computed again.

    layernorm leaves out the outputs of norms, mla_up_proj queries, keys and values, mlp and moe what is in these blocks,
    moe_act the activations of experts, and shared_experts what is in them.

    Args:
        tp: how many times the outputs of norms count: tp where each rank keeps those of the tokens of all.
    """
    numbers = 0.0
    if "layernorm" in modules:
        numbers += tp * h * kind.num_blocks
    if "mla_up_proj" in modules and kind.latent is not None:
        numbers += sum(product.outputs for product in kind.latent.products(h) if product.cut == COLUMNS)
    if "mlp" in modules and (block := kind.feed_forward) is not None:
        numbers += (3 if block.gated else 2) * block.intermediate_size
    if (experts := kind.experts) is None:
        return numbers
    top_k, per_channel = experts.num_experts_per_tok, experts.kept_of_experts
    shared_numbers = per_channel * experts.shared_expert_intermediate_size
    if "moe" in modules:
        return numbers + top_k * experts.row_channels(h) + shared_numbers
    if "moe_act" in modules:
        numbers += top_k * experts.moe_intermediate_size
    return numbers + shared_numbers * ("shared_experts" in modules)
