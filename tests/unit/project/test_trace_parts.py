"""benchmarks/trace_parts.py: which part a kernel belongs to, and what each part must move."""

from dataclasses import replace

import pytest

from benchmarks import layer_work
from benchmarks.layer_work import (
    ATTENTION,
    ATTENTION_PRODUCTS,
    CASTS,
    FEED_FORWARD,
    HEAD,
    LOSS,
    OPTIMIZER,
    POINTWISE,
    REST,
)  # fmt: skip
from benchmarks.trace_parts import Kernel, markdown, part_of, summary
from ultrabench.kernel.dryrun.fake_world import fake_world
from ultrabench.kernel.dryrun.rank_cost import measure_step
from ultrabench.kernel.rank.timeline import Span
from ultrabench.kernel.requests import CheckSpec
from ultrabench.layout import Layout
from ultrabench.sweep.config.load import load_hardware

SPEC = CheckSpec(layout=Layout(dp=1, mbs=2), precision="bf16").run
"""tiny: 4 layers, h=64, q=64, kv=32, f=128, V=256; 128 tokens."""
H100 = load_hardware("h100x8")


def trace(*kernels):
    """A trace of two steps of 1 ms; a kernel is its name, microseconds, operator and sizes of its arguments."""
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{n}",
            "ts": 1000 * n,
            "dur": 1000,
            "args": {},
        }
        for n in range(2)
    ]
    for n, (name, us, operator, dims) in enumerate(kernels):
        args = {"External id": n}
        events.append({"ph": "X", "cat": "cpu_op", "name": operator, "ts": 0, "dur": 1, "tid": 1,
                       "args": args | {"Input Dims": dims}})  # fmt: skip
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": 100 * n, "dur": us, "args": args})
    return {"traceEvents": events}


KERNELS = (
    ("nvjet_gate", 40, "aten::mm", [[128, 64], [64, 128]]),
    ("nvjet_gate_weights", 20, "aten::mm", [[128, 128], [128, 64]]),
    ("nvjet_q", 10, "aten::mm", [[128, 64], [64, 64]]),
    ("nvjet_fp8", 10, "aten::_scaled_mm", [[128, 64], [64, 32], []]),
    ("nvjet_head", 30, "aten::mm", [[128, 64], [64, 256]]),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 20, "aten::_cudnn_attention_forward", [[2, 4, 64, 16]]),
    ("triton_poi_fused__scaled_dot_product_cudnn_attention_mul_0", 5, "", []),
    ("triton_red_fused__log_softmax_0", 7, "", []), ("elementwise_kernel", 7, "aten::exp", [[128, 256]]),
    ("vectorized_elementwise_kernel", 5, "aten::mul", [[2, 64, 64], [64]]),
    ("multi_tensor_apply_kernel", 8, "aten::_fused_adamw_", [[], []]),
    ("multi_tensor_apply_kernel", 6, "aten::_foreach_copy_", [[], []]), ("Memcpy DtoD", 4, "", []),
)  # fmt: skip


def test_a_kernel_belongs_to_the_part_of_the_operator_that_launched_it():
    document = summary(trace(*KERNELS), SPEC, H100)
    us_by_part = {row["part"]: round(1e6 * 2 * row["seconds"]) for row in document["parts"] if row["seconds"]}
    assert us_by_part == {
        FEED_FORWARD: 60,
        ATTENTION_PRODUCTS: 20,
        HEAD: 30,
        ATTENTION: 20,
        POINTWISE: 10,
        LOSS: 14,
        OPTIMIZER: 8,
        REST: 10,
    }
    assert (document["steps"], document["step_time_s"]) == (2, 1e-3)
    assert document["idle_s"] == pytest.approx(1e-3 - 172e-6 / 2)  # no kernel runs beside another one


BF16, FP8, FP32 = "c10::BFloat16", "c10::Float8_e4m3fn", "float"
SCALING = (
    ("reduce_kernel", "linalg_vector_norm", [[128, 64], [], []], BF16),
    ("elementwise_kernel", "clamp", [[128, 1], [], []], FP32),
    ("elementwise_kernel", "exp2", [[128, 1]], FP32), ("elementwise_kernel", "mul", [[128, 64], [128, 1]], BF16),
    ("elementwise_kernel", "copy_", [[128, 64], [128, 64], []], FP8),
    ("triton_red_fused__scaled_mm__to_copy_add_clamp_exp2_floor_linalg_vector_norm_log2_mean_mul_pow_reciprocal_rsqrt_t"
     "_view_0", "", [], ""),
)  # fmt: skip
"""Operators with sizes and dtypes of a trace on a CPU, and a name that inductor makes of them."""
OTHERS = (
    ("reduce_kernel", "linalg_vector_norm", [[128, 64], [], []], FP32, OPTIMIZER),
    ("elementwise_kernel", "copy_", [[128, 64], [128, 64], []], BF16, POINTWISE),
    ("nvjet_fp8", "_scaled_mm", [[128, 64], [64, 32], [128, 1]], FP8, ATTENTION_PRODUCTS),
    ("triton_poi_fused_mul_silu_3", "", [], "", POINTWISE),
)


@pytest.mark.parametrize(
    ("name", "operator", "dims", "dtype", "part"), [*((*kernel, CASTS) for kernel in SCALING), *OTHERS]
)
def test_scales_and_casts_of_fp8_are_a_part_of_their_own(name, operator, dims, dtype, part):
    fp8 = replace(SPEC, kernel=replace(SPEC.kernel, precision="fp8"))
    assert part_of(Kernel(Span(0, 1, name), operator, dims, dtype), fp8) == part


def test_casts_read_inputs_and_weights_twice_and_gradients_of_outputs_once():
    tokens, layers = 128, 4
    inputs, outputs = tokens * (64 + 64 + 64 + 128), tokens * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    weights = 64 * (64 + 32 + 32 + 64 + 3 * 128)
    fp8 = replace(SPEC, kernel=replace(SPEC.kernel, precision="fp8"))
    assert layer_work.step_work(fp8)[CASTS].bytes == layers * (6 * (inputs + weights) + 4 * outputs)
    assert CASTS not in markdown(summary(trace(*KERNELS), SPEC, H100))


def test_a_table_names_what_bounds_a_part_and_the_share_of_its_rate():
    document = summary(trace(*KERNELS), SPEC, H100)
    head = next(row for row in document["parts"] if row["part"] == HEAD)
    assert head["flops"] == 6 * 128 * 64 * 256
    assert head["bytes"] == 3 * 2 * (128 * 64 + 128 * 256 + 64 * 256)
    assert (head["bound_by"], head["bound_s"]) == ("bytes", head["bytes"] / H100.hbm_bytes_per_s)
    share = head["bound_s"] / 15e-6
    assert (
        f"| head | 0.015 |  | 0.0126 | 0.344 | bytes | {1e3 * head['bound_s']:.4g} | {100 * share:.0f} % |"
        in markdown(document)
    )


def test_the_flops_of_all_parts_are_those_of_a_dry_run():
    """But for attention, of which the work is the causal half and a dry run counts all."""
    work = layer_work.step_work(SPEC)
    with fake_world(0, 1):
        executed = measure_step(SPEC)["hardware_flops"]
    assert sum(part.flops for part in work.values()) + work[ATTENTION].flops == executed


def test_fp8_halves_the_bytes_of_factors_and_raises_the_rate_of_layers_alone():
    kernel = replace(SPEC.kernel, precision="bf16")
    of_bf16 = layer_work.products(128, [(64, 128)], 2, 2)
    of_fp8 = layer_work.products(128, [(64, 128)], 1, 2)
    assert (of_fp8.flops, 3 * of_fp8.bytes) == (of_bf16.flops, 2 * of_bf16.bytes)
    faster = replace(H100, peak_flops_per_s={"bf16": 1e15, "fp8": 2e15})
    work = layer_work.Work(2e15, 1.0)
    limits = [layer_work.bound(part, work, faster, "fp8") for part in (FEED_FORWARD, HEAD)]
    assert limits == [("FLOPs", 1.0), ("FLOPs", 2.0)]
    assert (
        layer_work.bound(HEAD, work, replace(H100, device="cpu", peak_flops_per_s={}), kernel.precision)
        is None
    )
