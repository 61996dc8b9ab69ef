from dataclasses import replace
from functools import cache

import pytest

from ultrabench.attention_type import GroupedQuery, Latent
from ultrabench.feed_forward_type import FeedForward
from ultrabench.kernel.requests import TINY
from ultrabench.kernel_config import KernelConfig
from ultrabench.layer_type import LayerType
from ultrabench.layout import Layout
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.refusals import refusal


@cache
def configured(hardware):
    return load_config([f"hardware={hardware}", "model=1B", "sweep.nodes=[1]"])


@pytest.mark.parametrize(
    ("attention", "precision", "cp", "device", "architecture", "reason"),
    [
        ("auto", "fp64", 2, "cpu", None, None), ("flash", "fp32", 2, "cpu", None, None),
        ("math", "fp32", 1, "cpu", None, None),
        ("auto", "bf16", 2, "cuda", None, None), ("cudnn", "bf16", 2, "cuda", None, None),
        ("auto", "fp32", 1, "cuda", None, None),
        ("cudnn", "bf16", 1, "cpu", None, "attention=cudnn needs an NVIDIA GPU; on CPUs use auto, flash or math"),
        ("flash3", "bf16", 1, "cpu", None, "attention=flash3 needs an NVIDIA GPU; on CPUs use auto, flash or math"),
        ("math", "bf16", 2, "cuda", None, "attention=math cannot combine the chunks of cp=2"),
        ("auto", "fp32", 2, "cuda", None, "cp=2 needs precision=bf16 or fp8 on GPUs, not fp32"),
        ("flash", "fp64", 1, "cuda", None, "attention=flash needs precision=bf16 or fp8 on GPUs, not fp64: use auto"),
        ("auto", "bf16", 2, "cuda", "sm_90", "use math and cp=1"),
        ("flash", "fp8", 2, "cuda", None, None), ("auto", "fp8", 2, "cuda", "sm_90", "use math and cp=1"),
        ("flash3", "bf16", 2, "cuda", "sm_70", "needs sm_90; H100-SXM is sm_70, head_dim=264: use math and cp=1"),
        ("auto", "bf16", 2, "cuda", "sm_70", "needs sm_80 to sm_121; H100-SXM is sm_70, head_dim=264: "
        "use math and cp=1"),
    ],
)  # fmt: skip
def test_attention_that_a_device_or_a_ring_lacks_is_refused(
    attention, precision, cp, device, architecture, reason
):
    """What an accelerator of unknown architecture has is not checked."""
    kernel = KernelConfig(name="embedded", attention=attention, precision=precision)
    hardware = replace(configured("h100x8").hardware, architecture=architecture)
    shape = replace(load_model("tiny"), head_dim=264)
    message = refusal(kernel, Layout(dp=1, cp=cp), shape, 64, device, hardware)
    assert message is None if reason is None else reason in message


@pytest.mark.parametrize(
    ("layout", "changes", "architecture", "reason"),
    [
        ({"tp": 2}, {}, "sm_90", None), ({"tp": 2}, {}, "sm_89", None), ({"tp": 2}, {}, "gfx942", None),
        ({"cp": 2}, {}, None, None),
        ({}, {}, "sm_80", "needs sm_89 or newer, or gfx942, gfx950 or gfx12; H100-SXM is sm_80: use precision=bf16"),
        ({}, {}, "gfx90a", "H100-SXM is gfx90a: use precision=bf16"),
        ({"tp": 4}, {}, "sm_90", None),  # each rank has a key/value head, which another one has, too
        ({"tp": 4}, {"num_key_value_heads": 4, "head_dim": 8, "num_attention_heads": 8}, "sm_90",
         "sizes that are multiples of 16; num_key_value_heads*head_dim/tp=8: use precision=bf16"),
        ({"tp": 4}, {"head_dim": 8, "num_attention_heads": 8}, "sm_90",
            "multiples of 16; head_dim=8: use precision=bf16"),
        ({"tp": 2}, {"intermediate_size": 144}, "sm_90", "multiples of 16; intermediate_size/tp=72: "
        "use precision=bf16"),
        ({}, {"hidden_size": 72, "head_dim": 16}, "sm_90", "multiples of 16; hidden_size=72: use precision=bf16"),
        ({"cp": 4}, {"num_key_value_heads": 4}, "sm_90", "multiples of 16; mbs*seq_len/cp=8: use precision=bf16"),
        ({"cp": 4, "mbs": 2}, {"num_key_value_heads": 4}, "sm_90", None),
        ({}, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "sm_90",
         "precision=fp8 with num_experts=4; expert layers do not support fp8: use precision=bf16"),
    ],
)  # fmt: skip
def test_products_that_fp8_lacks_are_refused(layout, changes, architecture, reason):
    """For each rank, and never in bf16."""
    shape, hardware = (
        replace(TINY, **changes), replace(configured("h100x8").hardware, architecture=architecture)
    )  # fmt: skip
    seq_len = 32 if layout.get("cp") == 4 else 64
    refusals = [
        refusal(KernelConfig(name="embedded", precision=precision), Layout(dp=1, **layout), shape, seq_len, "cuda",
            hardware)
        for precision in ("fp8", "bf16")
    ]  # fmt: skip
    assert (refusals[0] is None) == (reason is None)
    assert reason is None or reason in refusals[0]
    assert refusals[1] is None


GROUPED = GroupedQuery(num_attention_heads=4, num_key_value_heads=4, head_dim=16)
LATENT = Latent(
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)
WIDE_VALUES = replace(LATENT, v_head_dim=48)
SINGLE_HEAD = replace(LATENT, num_attention_heads=2, qk_nope_head_dim=8, v_head_dim=8)


@pytest.mark.parametrize(
    ("attention", "precision", "cp", "device", "advice"),
    [
        ("auto", "bf16", 1, "cpu", "use attention=math or another model"), ("math", "bf16", 1, "cpu", None),
        ("flash", "bf16", 2, "cuda", "use another model"), ("auto", "fp32", 1, "cuda", None),
        ("auto", "bf16", 1, "cuda", "use attention=math or another model"),
    ],
)  # fmt: skip
def test_values_that_are_wider_than_keys_are_refused_by_fused_attention(
    attention, precision, cp, device, advice
):
    kernel = KernelConfig(name="embedded", attention=attention, precision=precision)
    types = (LayerType(latent=WIDE_VALUES, feed_forward=FeedForward(intermediate_size=128)),)
    shape = replace(TINY, layer_types=types)
    fact = "v_head_dim=48 is more than qk_nope_head_dim+qk_rope_head_dim=32"
    text = advice and f"{fact}; attention={attention} cannot pad keys to the width of values: {advice}"
    assert refusal(kernel, Layout(dp=1, cp=cp), shape, 64, device) == text


@pytest.mark.parametrize(
    ("axes", "attention", "widths", "reason"),
    [
        ({}, GROUPED, (128, 256), None), ({}, GROUPED, (128, 72), "intermediate_size/tp=72"),
        ({"tp": 2}, GROUPED, (128, 144), "intermediate_size/tp=72"), ({}, LATENT, (128, 256), None),
        ({"tp": 4}, LATENT, (128, 256), None), ({"tp": 4, "sequence_parallel": "off"}, LATENT, (128, 256), None),
        ({"tp": 4, "cp": 2}, LATENT, (128, 256), "mbs*seq_len/(cp*tp)=8"),
        ({"tp": 4, "cp": 2, "sequence_parallel": "off"}, LATENT, (128, 256), None),
        ({"tp": 4, "cp": 2}, GROUPED, (128, 256), None),  # multiplies the tokens of all ranks of tp
        ({"tp": 2}, LATENT, (128, 144), "intermediate_size/tp=72"),
        ({}, replace(LATENT, qk_rope_head_dim=8), (128, 256), "outputs of latent attention=24"),
        ({}, replace(LATENT, q_lora_rank=24), (128, 256), "outputs of latent attention=24"),
        ({"tp": 2}, SINGLE_HEAD, (128, 256), "outputs of latent attention=24"),
    ],
)  # fmt: skip
def test_products_that_fp8_lacks_are_refused_in_layers_of_any_type(axes, attention, widths, reason):
    """Of layers of two widths the second one counts as the first, and latents are products of a rank's own tokens."""
    kind = "latent" if isinstance(attention, Latent) else "grouped_query"
    types = tuple(
        LayerType(**{kind: attention, "feed_forward": FeedForward(intermediate_size=w)}) for w in widths
    )
    shape = replace(TINY, layer_types=types, num_attention_heads=4, num_key_value_heads=4)
    kernel, layout = KernelConfig(name="embedded", precision="fp8"), Layout(dp=1, **axes)
    text = refusal(kernel, layout, shape, 64, "cuda", configured("h100x8").hardware)
    expected_text = (
        reason and f"precision=fp8 needs matrix sizes that are multiples of 16; {reason}: use precision=bf16"
    )
    assert text == expected_text


@pytest.mark.parametrize(
    ("hardware", "attention", "head_dim", "lacking"),
    [
        ("h100x8", "flash3", 128, None), ("h200x8", "cudnn", 256, None), ("gb200x4", "cudnn", 128, None),
        ("a100-40x8", "cudnn", 128, None), ("a100-80x8", "flash", 256, None), ("mi300x-x8", "auto", 512, None),
        ("h100x8", "math", 512, None), ("mi300x-x8", "flash", 128, None), ("l40s-x8", "flash", 256, None),
        ("a100-80x8", "flash3", 128, "flash3 needs sm_90; A100-SXM-80GB is sm_80, head_dim=128: use auto"),
        ("mi300x-x8", "flash3", 128, "flash3 needs sm_90; MI300X is gfx942, head_dim=128: use auto"),
        ("mi300x-x8", "cudnn", 128, "cudnn needs an NVIDIA GPU; MI300X is gfx942, head_dim=128: use auto"),
        ("a100-80x8", "cudnn", 136, "cudnn needs head_dim <= 128; A100-SXM-80GB is sm_80, head_dim=136: use auto"),
        ("h100x8", "cudnn", 264, "cudnn needs head_dim <= 256; H100-SXM is sm_90, head_dim=264: use math"),
        ("h100x8", "cudnn", 100, "cudnn needs a head_dim that is a multiple of 8; H100-SXM is sm_90, head_dim=100"),
        ("h100x8", "auto", 264, "auto needs head_dim <= 256; H100-SXM is sm_90, head_dim=264: use math"),
        ("l40s-x8", "flash", 224, "flash needs head_dim <= 192 or > 224; L40S is sm_89, head_dim=224: use math"),
    ],
)  # fmt: skip
def test_attention_that_an_accelerator_lacks_is_refused_in_the_plan(hardware, attention, head_dim, lacking):
    config = configured(hardware)
    shape, kernel = replace(config.models[0], head_dim=head_dim), replace(config.kernel, attention=attention)
    candidates = make_plan(replace(config, models=(shape,), kernel=kernel)).candidates
    reasons = {c.reason for c in candidates if c.rule == "kernel" and c.reason.startswith("attention=")}
    assert bool(reasons) == bool(lacking)
    assert all(reason.startswith(f"attention={lacking}") for reason in reasons)
