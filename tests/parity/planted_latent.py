"""Faults of latent attention."""

from dataclasses import replace

from tests.parity.fault import planted
from ultrabench.kernel import model, step
from ultrabench.kernel.compat import _widened
from ultrabench.kernel.dryrun import counts


def latent_norms(params):
    """The weights of the norms of latents, with their names."""
    return [(name, param) for name, param in params if name.endswith("_a_norm.weight")]


@planted(step, "sum_whole_gradients", parity="tp=2 mla dense", replicas="tp=2 mla dense")
def unsummed_latent_norms(right, params, cuts, ranks):
    """Gradients of the norms of latents, summands on each rank of tp, pass for sums."""
    names = {name for name, _ in latent_norms(params)}
    right([(name, param) for name, param in params if name not in names], cuts, ranks)


@planted(step, "sum_whole_gradients", parity="tp=2 mla dense, tp=2 mla dense sequence_parallel=off")
def latent_norms_summed_twice(right, params, cuts, ranks):
    """Gradients of the norms of latents are summed over tp once more than needed."""
    right(params, cuts, ranks)
    right(latent_norms(params), cuts, replace(ranks, sequence_parallel=True))


@planted(step, "sum_whole_gradients", parity="tp=2 mla dense narrow")
def unsummed_projections(right, params, cuts, ranks):
    """Gradients of the projections to latents, summands on each rank of tp, pass for sums."""
    right([(name, param) for name, param in params if "_a." not in name], cuts, ranks)


@planted(model, "rotate_pairs", transformers="deepseek-v3")
def rope_on_the_left(right, x, cos, sin):
    """The first channels of a head of queries are rotated instead of the last ones."""
    rotary_width = 2 * cos.shape[-1]
    rotated = right(x[..., :rotary_width], cos, sin)
    return model.torch.cat((rotated, x[..., rotary_width:]), dim=-1)


@planted(model, "rotate_pairs", transformers="moonlight")
def halves_rotate(right, x, cos, sin):
    """The pairs that rotate together are (i, i + R/2) instead of (2i, 2i + 1)."""
    unrotated, rotated = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    return model.torch.cat((unrotated, model.rotate(rotated, cos, sin)), dim=-1)


@planted(model, "LATENT_NORM_EPS", transformers="deepseek-v3")
def eps_of_the_model(right):
    """The norms of latents have the eps of the other norms."""
    return 0.1  # that of the model with which it is planted


@planted(model, "own_memory", cost="test_a_layer_of_latents_keeps_what_the_closed_form_says 2")
def kept_key_half(right, view):
    """Values are a view of the product that holds the keys, too, which is then kept."""
    return view


@planted(counts.ExecutedFlops, "record", unit="test_attention.test_flops_of_attention_follow_both_widths")
def padded_flops(right, self, func, args, *rest):
    """FLOPs of attention are counted as if values were as wide as keys."""
    if "attention" in func._schema.name:
        position = 3 if "backward" in func._schema.name else 2
        args = [*args]
        args[position] = _widened(args[position], args[position - 1].shape[-1])
    right(self, func, args, *rest)
