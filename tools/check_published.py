#!/usr/bin/env python3
"""Counts NVIDIA's published settings that a kernel file can express, and lists what it leaves out.

Example: python tools/check_published.py layouts.csv --bridge Megatron-Bridge --python PYTHON --checkout Megatron-LM

The CSV has a row for each published run, with the columns model, gpu, precision, seq_len, gbs, mbs, tp, pp, cp, ep,
vpp, and num_gpus or gpus; a column recompute has the modules that a run recomputes, if it differs from its recipe. For
each distinct row the recipe of the same model, GPU, count and precision is read from Megatron-Bridge
(tools/bridge_recipes.py). Its settings become values of knobs, the layout of the row is looked for among the candidates
of the kernel, and Megatron-LM's own parser judges the command (tools/check_flags.py).
"""

import argparse
import csv
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bridge_recipes import NAME
from check_flags import Drawn, Judge

from ultrabench.errors import UltrabenchError
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import make_plan

Settings = Mapping[str, Any]
FORMATS = {"fp8cs": "fp8", "fp8ds": "fp8", "fp8sc": "fp8", "fp8mx": "mxfp8"}
"""Precision in the name of a recipe -> the precision of a cell, where they differ."""
MODEL_FILES = {"nemotron-3-nano-30b": "nemotron-3"}
"""Published name -> the name of the model file, where they differ."""
OF_THE_MODEL = re.compile(
    r"model\.(_.*|.*(hidden_size|num_layers|heads|groups|query|channels|ranks?|rotary.*|yarn.*|seq_length|mamba.*|"
    r"init_method.*|activation.*|normalization|hybrid.*|num_moe_experts|topk.*|score_function|expert_bias|vocab.*|"
    r"mtp.*|aux_loss.*|load_balancing_type|dropout|softmax.*|shared_expert_intermediate_size|num_groups|scaling_factor|"
    r"untie.*|position.*|share.*|make_vocab.*|should_pad_vocab|expert_bias_update.*|is_hybrid_model))"
)
"""Settings that say the model, which `model=` of a sweep gives."""
WITHOUT_EFFECT = re.compile(
    r"(checkpoint|dataset|logger|tokenizer|scheduler|validation|profiling|rng|rerun_state_machine|dist|peft|env_vars)\b.*|"
    r"train\.(?!manual_gc$).*|optimizer\.(lr|min_lr|weight_decay|adam.*|clip_grad|bf16|fp16|optimizer|sgd.*|"
    r"main_params_dtype|use_distributed_optimizer|lion.*|muon.*|overlap_param_gather)|"
    r"ddp\.(check.*|use_distributed_optimizer|overlap_param_gather|data_parallel_sharding_strategy|num_buckets)|"
    r"model\.cross_entropy_fusion_impl|mixed_precision\.(?!fp8_dot|fp8_multi).*|.*te_rng_tracker|model\.(transformer_impl|pipeline_dtype|"
    r"apply_rope_fusion|bias_activation_fusion|persist_layer_norm|masked_softmax_fusion|cuda_graph_warmup_steps|"
    r"attention_softmax_in_fp32|apply_query_key_layer_scaling|seq_length|"
    r"moe_router_padding_for_fp8|moe_a2a_overlap|init_model_with_meta_device|account_for.*|num_layers_in.*|"
    r"deallocate.*|calculate_per_token_loss|cpu_offloading_weights|overlap_p2p_comm|batch_p2p_comm|"
    r"moe_paged_stash.*|moe_pad_experts.*|moe_mlp_glu.*|external_cuda_graph|qk_clip|cp_comm_type|recompute_method|"
    r"use_fused_weighted_squared_relu|fine_grained_offloading.*)|comm_overlap\.(tp_comm_bootstrap_backend|"
    r"overlap_grad_reduce|overlap_param_gather.*|align_param_gather)"
)
"""Settings that follow from others, or that change no measured step."""


@dataclass(kw_only=True)
class Row:
    """A published setting, and what was found about it."""

    cells: Mapping[str, str]
    problem: str = ""
    """Why it cannot be expressed; empty if it can."""
    left_out: list[str] = field(default_factory=list)
    """Settings of its recipe that no knob has."""
    same_layout: bool = False
    """Whether the recipe has the layout of the row."""
    spec: RunSpec | None = None
    config: SweepConfig | None = None

    def number(self, *names: str, default: int = 1) -> int:
        """The number in the first of these columns that the row has."""
        text = next((self.cells[name] for name in names if self.cells.get(name)), "")
        return int(text) if text else default

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.number("num_gpus", "gpus")

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two rows the same setting."""
        numbers = (self.number(name) for name in ("seq_len", "gbs", "mbs", "tp", "pp", "cp", "ep", "vpp"))
        names = ("model", "gpu", "precision", "recompute")
        return (
            self.gpus,
            self.number("fsdp", default=0),
            *numbers,
            *(self.cells.get(name, "") for name in names),
        )

    @property
    def label(self) -> str:
        """The row in one line."""
        degrees = " ".join(f"{name}{self.number(name)}" for name in ("tp", "pp", "cp", "ep", "vpp", "mbs"))
        fsdp = " fsdp" * (self.number("fsdp", default=0) > 1)
        return (
            f"{self.cells['model']} {self.cells['precision']} {self.gpus} x {self.cells['gpu']} {degrees}{fsdp}"
            f" gbs{self.number('gbs')}"
        )


def read_rows(path: Path, source: str) -> list[Row]:
    """The distinct rows whose source has this text."""
    with path.open() as table:
        rows = [
            Row(cells=cells) for cells in csv.DictReader(table) if source.lower() in cells["source"].lower()
        ]
    return [*{row.key: row for row in rows}.values()]


def recipe_of(row: Row, recipes: Mapping[str, Settings]) -> tuple[str, Settings] | None:
    """The name and the settings of the recipe of the same model, GPU, count and precision; None if there is none."""
    model = re.sub(r"\W", "", row.cells["model"].replace("-", "_"))
    gpu = row.cells["gpu"].split("-")[0].lower()
    for name, settings in recipes.items():
        parts = NAME.fullmatch(name)
        is_model = parts and f"{model}_".startswith(f"{parts['model']}_")
        precision = parts and FORMATS.get(parts["precision"], parts["precision"])
        if is_model and (parts["gpu"], parts["gpus"], precision) == (
            gpu,
            str(row.gpus),
            row.cells["precision"],
        ):
            return name, settings
    return None


def stage_layers(recipe: Settings, shape: ModelShape, num_stages: int) -> str:
    """The layers of each stage, as the axis pp_layout has them; auto where all stages have equally many."""
    layout = recipe.get("model.pipeline_model_parallel_layout")
    counts = (
        [stage.count("decoder") for stage in layout] if isinstance(layout, list) else _counts(layout or "")
    )
    if len(counts) != num_stages or sum(counts) != shape.num_hidden_layers:
        if shape.num_hidden_layers % num_stages == 0:
            return "auto"
        # The embedding and the loss count as a layer each.
        per_stage, rest = divmod(shape.num_hidden_layers + 2, num_stages)
        if rest:
            return "even"
        counts = [per_stage - (index in (0, num_stages - 1)) for index in range(num_stages)]
    return "auto" if len({*counts}) == 1 else "-".join(map(str, counts))


def _counts(layout: str) -> list[int]:
    """The number of layers of each stage of a layout such as `Et*2|(tt|)*3tL`."""
    text = layout.replace(",", "")
    while match := re.search(r"\(([^()]*)\)\*(\d+)", text):
        text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    text = re.sub(r"(\w)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    return [stage.count("t") for stage in text.split("|")]


def _joined(modules: Sequence[str] | None) -> str:
    return "+".join(sorted(modules or ())) or "none"


def knobs_of(recipe: Settings, row: Row) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Each knob with its value, and the settings of the recipe from which it follows."""
    get = recipe.get
    on_off = {True: "on", False: "off", None: "off"}
    has_experts, is_fsdp = bool(get("model.moe_token_dispatcher_type")), bool(get("ddp.use_megatron_fsdp"))

    def switch(knob: str, *names: str) -> tuple[str, str, tuple[str, ...]]:
        return knob, on_off[any(bool(get(name)) for name in names)], names

    gathers = {"fp8": "fp8", "mxfp8": "mxfp8"}.get(row.cells["precision"], "bf16")
    names = ("mixed_precision.fp8_param_gather", "model.fp8_param_gather", "model.fp8_param")
    param_gather = gathers if any(map(get, names)) else "bf16"
    if get("mixed_precision.fp4_param_gather"):
        param_gather = "nvfp4"
    yield (
        "param_gather",
        param_gather,
        (*names, "mixed_precision.fp4_param_gather", "ddp.reuse_grad_buf_for_mxfp8_param_ag"),
    )
    if row.cells["precision"] == "fp8":
        yield "fp8_recipe", str(get("mixed_precision.fp8_recipe")), ("mixed_precision.fp8_recipe",)
    ends = get("mixed_precision.first_last_layers_bf16") and row.cells["precision"] != "bf16"
    yield "bf16_layers", "ends" if ends else "none", ("model.first_last_layers_bf16",)
    yield "grad_reduce", "fp32" if get("ddp.grad_reduce_in_fp32") else "bf16", ("ddp.grad_reduce_in_fp32",)
    yield switch("grad_average", "ddp.average_in_collective")
    fusion = get("model.gradient_accumulation_fusion")
    yield "grad_fusion", "off" if fusion is False else "on", ("model.gradient_accumulation_fusion",)
    names = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")
    names = tuple(f"optimizer.{name}" for name in names)
    state = "bf16" if get(names[0]) and get(names[1]) == "bfloat16" else "fp32"
    if state == "bf16" and get(names[3]) == "bfloat16" and not get("ddp.grad_reduce_in_fp32"):
        state = "bf16+gradients"
    yield "optimizer_state", state, names
    step_gather = (
        get("optimizer.overlap_param_gather_with_optimizer_step") and row.number("vpp") > 1 and not is_fsdp
    )
    yield "step_gather", on_off[bool(step_gather)], ("optimizer.overlap_param_gather_with_optimizer_step",)
    is_fused = get("model.cross_entropy_loss_fusion")
    yield "cross_entropy", "native" if is_fused else "unfused", ("model.cross_entropy_loss_fusion",)
    backend = get("model.attention_backend")
    yield "attention_backend", str(backend or "auto"), ("model.attention_backend",)
    yield "garbage_collection", "manual" if get("train.manual_gc") else "automatic", ("train.manual_gc",)
    overlaps_tp = (
        row.number("tp") > 1 and get("model.sequence_parallel") and get("comm_overlap.tp_comm_overlap")
    )
    yield "tp_overlap", on_off[bool(overlaps_tp)], ("comm_overlap.tp_comm_overlap",)
    names = tuple(f"model.recompute_{name}" for name in ("granularity", "method", "modules", "num_layers"))
    granularity, method, modules, num_layers = map(get, names)
    if text := row.cells.get("recompute"):
        granularity, modules = "selective", [] if text == "none" else text.split("+")
    is_block = granularity == "full" and method == "block"
    yield "recompute_block", str(num_layers) if is_block else "0", names
    if granularity == "selective":
        yield "recompute_modules", "core_attn" if modules is None else _joined(modules), names
    names = ("model.fine_grained_activation_offloading", "model.offload_modules")
    yield "offload_modules", _joined(get(names[1])) if get(names[0]) else "none", names
    names = ("model.cpu_offloading", "model.cpu_offloading_num_layers")
    yield "offload_layers", str(get(names[1])) if get(names[0]) else "0", names
    names = ("model.cuda_graph_impl", "model.cuda_graph_scope")
    scope = get(names[1]) or []
    scope = [scope] if isinstance(scope, str) else scope
    implementation = "full_iteration" if "full_iteration" in scope else str(get(names[0]) or "none")
    captures_parts = implementation in ("local", "transformer_engine")
    yield "cuda_graph", implementation, names
    parts = [part for part in scope if part != "full"] if captures_parts else []
    yield "cuda_graph_modules", _joined(parts) if parts else "all", names
    connections = get("env_vars").get("CUDA_DEVICE_MAX_CONNECTIONS") if get("env_vars") else None
    if connections:
        yield "max_connections", str(connections), ()
    if is_fsdp:
        names = ("ddp.nccl_ub", "ddp.fsdp_double_buffer", "ddp.fsdp_manual_registration")
        buffers = "nccl" if get(names[0]) else "double" if get(names[1]) else "off"
        yield "fsdp_buffers", buffers, names
        unit = get("ddp.suggested_communication_unit_size")
        yield "fsdp_unit", str(unit or "usual"), ("ddp.suggested_communication_unit_size",)
    if has_experts and row.cells.get("ep") not in ("", None):
        names = ("model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend")
        is_flex = get(names[0]) == "flex"
        backend = str(get(names[1]) or "deepep")
        yield "dispatcher", backend if is_flex else str(get(names[0])), names
        sms = get(f"model.moe_{backend}_num_sms") if is_flex else None
        yield (
            "dispatcher_sms",
            str(sms or "usual"),
            ("model.moe_hybridep_num_sms", "model.moe_deepep_num_sms"),
        )
        sms_name = "model.moe_hybridep_num_sms_preprocessing"
        yield "hybridep_sms", str(get(sms_name) or 108), (sms_name,)
        names = ("comm_overlap.overlap_moe_expert_parallel_comm", "comm_overlap.delay_wgrad_compute")
        overlap = "delayed_wgrad" if get(names[0]) and get(names[1]) else on_off[bool(get(names[0]))]
        yield "ep_overlap", overlap, names
        name = "model.high_priority_a2a_comm_stream"
        yield "ep_priority", "high" if get(name) else "usual", (name,)
        yield "expert_tp", "1", ("model.expert_tensor_parallel_size",)
        name = "model.moe_expert_rank_capacity_factor"
        yield "expert_capacity", str(get(name) or "none"), (name,)
        yield switch("expert_padding", "model.moe_router_padding_for_quantization")
        yield switch("grouped_gemm", "model.moe_grouped_gemm")
        yield switch("permute_fusion", "model.moe_permute_fusion")
        yield switch("router_fusion", "model.moe_router_fusion")
        is_fp32 = get("model.moe_router_dtype") in ("fp32", "float32")
        yield "router_dtype", "fp32" if is_fp32 else "bf16", ("model.moe_router_dtype",)
        yield switch("shared_expert_overlap", "model.moe_shared_expert_overlap")
        yield switch("op_fuser", "model.use_transformer_engine_op_fuser")
        yield switch("output_fp8", "model.fp8_output_proj")


DEGREES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
}  # fmt: skip
ROUTING = "model.moe_router_force_load_balancing"
"""Whether tokens are spread evenly over all experts instead of by a router that learns."""
LAYOUT_SETTINGS = {
    *(f"model.{name}" for name in DEGREES.values()), "model.sequence_parallel", "ddp.overlap_grad_reduce",
    "model.pipeline_model_parallel_layout", "ddp.use_megatron_fsdp", ROUTING,
}  # fmt: skip


def settings_without_knob(recipe: Settings, read_settings: set[str]) -> Iterator[str]:
    """The settings of a recipe that neither a knob nor the layout nor the model has, and that may change a step."""
    has_experts = recipe.get("model.expert_model_parallel_size") is not None
    for name, value in recipe.items():
        is_known = name in read_settings or name in LAYOUT_SETTINGS
        is_idle = value in (None, False, [], 0) or (name.startswith("model.moe_") and not has_experts)
        if not (is_known or is_idle or OF_THE_MODEL.fullmatch(name) or WITHOUT_EFFECT.fullmatch(name)):
            value_text = re.sub(r"<class .__main__.(.*).>", r"\1", str(value))
            yield f"{name}={value_text}"
    if recipe.get("model.cross_entropy_fusion_impl") == "te":
        yield "model.cross_entropy_fusion_impl=te (Megatron-LM refuses it; native instead)"


def hardware_of(gpu: str) -> str | None:
    """The name of the hardware file of a GPU; None if there is none."""
    prefix = gpu.split("-")[0].lower()
    return next((name for name in files("hardware") if re.fullmatch(rf"{prefix}x\d+", name)), None)


def expressed(row: Row, kernel: str, recipes: Mapping[str, Settings]) -> None:
    """Finds the run of a row among the candidates of a kernel, or why there is none."""
    found = recipe_of(row, recipes)
    if found is None:
        row.problem = "no recipe of the same model, GPU, count and precision"
        return
    recipe = found[1]
    model = MODEL_FILES.get(row.cells["model"], row.cells["model"])
    hardware = hardware_of(row.cells["gpu"])
    if model not in files("model") or hardware is None:
        row.problem = f"no file for {'the model' if hardware else 'the GPU ' + row.cells['gpu']}"
        return
    num_virtual, is_fsdp = row.number("vpp"), bool(recipe.get("ddp.use_megatron_fsdp"))
    is_fsdp = row.number("fsdp", default=0) > 1 if "fsdp" in row.cells else is_fsdp
    first = load_config([f"model={model}", f"hardware={hardware}", f"kernel={kernel}"])
    shape = first.models[0]
    modules = recipe.get("model.mtp_num_layers") if "without MTP" not in row.cells.get("notes", "") else 0
    same_degrees = all((recipe.get(f"model.{key}") or 1) == row.number(name) for name, key in DEGREES.items())
    row.same_layout = same_degrees and recipe.get("train.micro_batch_size") == row.number("mbs")
    pairs = [*knobs_of(recipe, row)]
    knobs = {knob: value for knob, value, _ in pairs}
    unknown = [
        f"{knob}={value}" for knob, value in knobs.items() if not first.kernel.has_knob_value(knob, value)
    ]
    row.left_out = [*settings_without_knob(recipe, {name for *_, names in pairs for name in names}), *unknown]
    for pair in unknown:
        del knobs[pair.partition("=")[0]]
    if knobs.get("ep_overlap", "off") != "off" and row.number("pp") > 1 and num_virtual == 1:
        row.left_out += [
            f"ep_overlap={knobs['ep_overlap']} (needs virtual stages, which this older row does not have)"
        ]
        knobs["ep_overlap"] = "off"
    if knobs.get("ep_overlap", "off") != "off" and knobs["shared_expert_overlap"] == "on":
        row.left_out += ["shared_expert_overlap=on (Megatron-LM refuses it beside ep_overlap)"]
        knobs["shared_expert_overlap"] = "off"
    recompute = "full" if recipe.get("model.recompute_method") == "uniform" else "none"
    routing = "balanced" if recipe.get(ROUTING) else "learned"
    num_stages = row.number("pp") * num_virtual
    overrides = [
        f"kernel={kernel}", f"model={model}", f"hardware={hardware}", f"kernel.precision={row.cells['precision']}",
        f"sweep.nodes=[{row.gpus // first.hardware.gpus_per_node}]", f"sweep.gbs={row.number('gbs')}",
        f"sweep.seq_len={row.number('seq_len')}", "max_p_oom=1", f"sweep.mbs=[{row.number('mbs')}]",
        *(f"sweep.{name}=[{row.number(name)}]" for name in ("tp", "pp", "cp", "ep")),
        f"sweep.zero_stage=[{3 if is_fsdp else 1}]", f"sweep.recompute=[{recompute}]",
        f"kernel.routing={routing}",
    ]  # fmt: skip
    if row.number("pp") > 1:
        layers = stage_layers(recipe, shape, num_stages)
        # The grid divides the layers of auto by cost, which may leave the last stages empty.
        layers = "even" if layers == "auto" and num_stages == shape.num_hidden_layers else layers
        overrides += [f"sweep.pp_layout=[{layers}]"]
        schedule = "interleaved" if num_virtual > 1 else "1f1b"
        overrides += [f"sweep.pp_schedule=[{schedule}]"]
        overrides += [f"sweep.virtual_stages=[{num_virtual}]"] if num_virtual > 1 else []
    overrides += [f'+sweep.flags.{knob}=["{value}"]' for knob, value in knobs.items()]
    config = load_config(overrides)
    env = {name: str(value) for name, value in (recipe.get("env_vars") or {}).items()}
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    config = replace(config, kernel=replace(config.kernel, env=config.kernel.env | env))
    if modules:
        models = tuple(replace(model, num_nextn_predict_layers=modules) for model in config.models)
        config = replace(config, models=models)
    candidates = make_plan(config).candidates
    runs = [candidate for candidate in candidates if candidate.rule is None]
    if not runs:
        row.problem = next((c.reason or "" for c in candidates), "no candidate fills the GPUs and the batch")
        return
    row.spec, row.config = runs[0].spec, config


def show(rows: Sequence[Row], title: str) -> None:
    """Prints what is expressed and what is not."""
    expressed_rows = [row for row in rows if not row.problem]
    print(
        f"{title}: {len(rows)} distinct settings, {len(expressed_rows)} are candidates whose command parses"
    )
    num_whole = sum(not any("=te" not in setting for setting in row.left_out) for row in expressed_rows)
    print(f"  with all settings of the recipe but cross_entropy_fusion_impl: {num_whole}")
    num_same = sum(row.same_layout for row in expressed_rows)
    print(f"  with the layout of the recipe: {num_same}; with another one: {len(expressed_rows) - num_same}")
    for problem, number in Counter(row.problem for row in rows if row.problem).most_common():
        print(f"  not expressed, {number}: {problem}")
        for row in rows:
            if row.problem == problem:
                print(f"      {row.label}")
    settings = Counter(setting for row in expressed_rows for setting in row.left_out)
    for setting, number in settings.most_common():
        print(f"  setting without a knob, in {number} of {len(expressed_rows)}: {setting}")


def main() -> int:
    """Reads, judges and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", type=Path, help="CSV of published runs")
    parser.add_argument("--source", default="bridge", help="text in the column source (default bridge)")
    parser.add_argument("--bridge", required=True, type=Path, help="sources of Megatron-Bridge")
    parser.add_argument("--python", required=True, help="Python of Megatron-LM's environment")
    parser.add_argument("--checkout", required=True, type=Path, help="sources of Megatron-LM")
    parser.add_argument("--kernel", default="megatron-perf")
    options = parser.parse_args()
    reader = [sys.executable, str(Path(__file__).parent / "bridge_recipes.py"), str(options.bridge)]
    recipes = json.loads(subprocess.check_output(reader))
    rows = read_rows(options.table, options.source)
    for row in rows:
        try:
            expressed(row, options.kernel, recipes)
        except UltrabenchError as error:
            row.problem = str(error)
    for capability in ("9.0", "10.0"):
        part = [
            row for row in rows if row.spec and (row.cells["gpu"].startswith("H")) == (capability == "9.0")
        ]
        if part:
            judge = Judge(part[0].config, options.python, options.checkout, capability)
            for row, refusal in zip(part, judge.judge([Drawn(spec=row.spec) for row in part]), strict=True):
                row.problem = f"its parser says: {refusal}" if refusal else ""
    show(rows, options.table.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
