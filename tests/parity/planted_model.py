"""Faults of decoder, initial values and data: a layout has them, and the process with which it is compared, too."""

import torch

from tests.parity.fault import changed, planted
from ultrabench.kernel import activation, data, model, rope

INITIAL = "test_model.test_initial_values_depend_on_seed_and_name"
LATER_TOKENS = "test_model.test_targets_are_the_next_tokens"
PREDICTION = "test_model.test_a_module_predicts_the_token_after_the_next"
TOKENS = "test_model.test_tokens_depend_on_seed_step_and_index_only"


@planted(model, "rotate", transformers="llama")
def no_rope(right, x, cos, sin):
    """Queries and keys are not rotated."""
    return x


@planted(model, "rotate", transformers="llama")
def neighbours_rotate(right, x, cos, sin):
    """The pairs that rotate together are (2i, 2i + 1) instead of (i, i + D/2)."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


@planted(rope, "rope_frequencies", transformers="llama-scaled")
def no_rope_scaling(right, rotation, half):
    """The llama3 scaling of the rotation is ignored."""
    return right(rotation._replace(scaling=None), half)


@planted(rope, "rope_frequencies", transformers="qwen3")
def fixed_rope_theta(right, rotation, half):
    """The base of the rotation is always 10,000."""
    return right(rotation._replace(base=10000.0), half)


@planted(model, "rope_tables", transformers="glm")
def whole_rotation(right, spans, rotation, like):
    """All channels of a head are rotated, whatever the shape says."""
    return right(spans, rotation._replace(width=2 * rotation.width), like)


@planted(rope, "table_factor", transformers="llama-yarn")
def unscaled_rotation(right, rotation):
    """What yarn multiplies rotated queries and keys by is left out."""
    return 1.0


@planted(model, "score_factor", transformers="deepseek-v3-groups")
def unscaled_scores_of_yarn(right, rotation):
    """What yarn multiplies all scores of latent attention by is left out."""
    return 1.0


@planted(rope, "_yarn_bounds", transformers="llama-yarn")
def yarn_of_turns_swapped(right, base, width, scaling):
    """yarn divides the frequencies that turn fast in place of those that turn slowly."""
    return right(base, width, scaling)[::-1]


@planted(model.GroupedQueryAttention, "_heads", transformers="olmoe")
def norm_of_each_head(right, self, x, norm):
    """Queries and keys are normalised in each head instead of across heads."""
    heads = right(self, x, None)
    if norm is None:
        return heads
    rstd = torch.rsqrt(heads.square().mean(-1, keepdim=True) + norm.eps)
    return heads * rstd * norm.weight.view(-1, self.head_width)


@planted(model.GroupedQueryAttention, "_heads", transformers="qwen2")
def bias_without_gradient(right, self, x, norm):
    """Values get no gradient of their bias."""
    return right(self, x - self.v.bias + self.v.bias.detach() if x.shape[-1] == len(self.v.bias) else x, norm)


def with_attention(functional, change, **options):
    """A `functional` whose attention has these options, and first changes its queries, keys and values."""

    def attention(*heads, **kwargs):
        return functional.scaled_dot_product_attention(*change(*heads), **(kwargs | options))

    return changed(functional, scaled_dot_product_attention=attention)


@planted(model, "functional", transformers="llama")
def not_causal(right):
    """Each token attends to all tokens."""
    return with_attention(right, lambda *heads: heads, is_causal=False)


@planted(model, "functional", transformers="llama")
def wrong_scale(right):
    """Scores of attention are divided by D instead of its root."""
    return with_attention(right, lambda q, k, v: (q / q.shape[-1] ** 0.5, k, v))


@planted(model, "functional", transformers="llama")
def reordered_groups(right):
    """Query head n reads key head n mod K instead of n K / N."""

    def tiled(q, *others):
        return (q, *(t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in others))

    return with_attention(right, tiled, enable_gqa=False)


@planted(activation, "functional", transformers="llama")
def gelu(right):
    """The activation function is GELU instead of SiLU."""
    return changed(right, silu=right.gelu)


@planted(activation, "functional", transformers="arcee-gelu-tanh")
def exact_gelu(right):
    """The GELU is computed exactly where its approximation by tanh is asked for."""
    return changed(right, gelu=lambda x, approximate: right.gelu(x))


@planted(model, "activate", transformers="arcee")
def relu_without_square(right, name, x):
    """The activation relu2 is relu, without the square."""
    return model.functional.relu(x) if name == "relu2" else right(name, x)


@planted(model.RmsNorm, "__init__", transformers="llama-scaled")
def fixed_eps(right, self, width, eps):
    """The eps of all norms is 1e-6, whatever the shape says."""
    right(self, width, 1e-6)


@planted(model.RmsNorm, "forward", transformers="qwen3")
def no_qk_norm(right, self, x):
    """Queries and keys are not normalised."""
    return x if x.dim() == 4 else right(self, x)


@planted(model.FeedForward, "forward", transformers="llama")
def gate_for_up(right, self, x, *_):
    """The activation function is applied to `up` instead of `gate`."""
    up, gate = self.column_products(x, self.gate.weight, self.up.weight)
    return self.row_product(model.functional.silu(gate) * up, self.down.weight)


@planted(model.Decoder, "tie", transformers="llama-tied")
def not_tied(right, self):
    """Embedding and head are two parameters although the shape ties them."""


@planted(model.Decoder, "initial_value", unit=INITIAL)
def keys_like_queries(right, self, name, *args):
    """Keys of a layer start with the values of its queries."""
    return right(self, name.replace("attention.k", "attention.q"), *args)


@planted(model.Decoder, "initial_value", unit=INITIAL)
def all_layers_alike(right, self, name, *args):
    """All layers start with the values of the first."""
    return right(self, ".".join("0" if part.isdigit() else part for part in name.split(".")), *args)


@planted(model.Decoder, "initial_value", unit=INITIAL)
def wide_values(right, *args):
    """Initial values are ten times too large."""
    return right(*args) * 10


@planted(model.Decoder, "initial_value", unit=INITIAL)
def rounded_values(right, *args):
    """Initial values are rounded to bf16."""
    return right(*args).bfloat16().float()


@planted(model.Decoder, "initial_value", unit=INITIAL)
def biases_from_zero(right, self, name, *args):
    """Biases start with 0, which hides faults of theirs."""
    return right(self, name, *args) * (not name.endswith("bias"))


@planted(data, "sample", unit=TOKENS)
def same_sample(right, seed, step, index, *args):
    """All samples of a step are the same."""
    return right(seed, step, 0, *args)


@planted(data, "sample", unit=TOKENS)
def same_data(right, seed, step, *args):
    """All steps train on the same tokens."""
    return right(seed, 1, *args)


@planted(data, "make_batch", unit=TOKENS)
def copied_targets(right, *args):
    """A target is the token itself instead of the next one."""
    inputs, _ = right(*args)
    return inputs, inputs


@planted(data, "make_batch", unit=LATER_TOKENS)
def later_targets_shifted(right, *args):
    """Modules that predict one more token get the targets of the model itself."""
    inputs, targets = right(*args)
    return inputs, targets if targets.dim() == 2 else targets[..., :1].expand_as(targets)


@planted(model, "PREDICT_WEIGHT", unit=PREDICTION)
def whole_prediction(right):
    """The loss of modules that predict one more token has the weight of that of the model."""
    return 1.0


@planted(model.TokenJoin, "forward", unit=PREDICTION)
def unjoined(right, self, x, embedded):
    """Modules that predict one more token do not get that token."""
    return right(self, x, torch.zeros_like(embedded))


@planted(model.RmsNorm, "forward", ignored="tp=2 bf16")
def narrow_norms(right, self, x):
    """Norms are computed in the precision of the products."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


@planted(model, "rope_tables", ignored="cp=2 bf16")
def narrow_angles(right, spans, rotation, like):
    """The angles of rotations are computed in the precision of the products."""
    return right(spans, rotation, like, like.dtype)
