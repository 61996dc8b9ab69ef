"""The decoder gives the logits and gradients of the models of transformers, which share no code with it.

Layouts are compared with the decoder on one process, so a fault of the decoder itself (no rotation, a wrong mask)
is in both; only another implementation shows it. Both models are made from the same config.json.
"""

import math
from copy import deepcopy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.planted import FAULTS
from ultrabench.kernel.model import Decoder, cross_entropy
from ultrabench.kernel.moe import router_biases
from ultrabench.stages import split_stages
from ultrabench.sweep.config.checkpoint import shape_of

SEQ_LEN, VOCAB = 24, 64
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHARED = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT = {
    "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8,
    "num_key_value_heads": 4, "rms_norm_eps": 0.1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Values that are narrower than keys, and norms of latents with another eps than the others."""
GROUPS = {"n_group": 4, "topk_group": 2}
CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama-scaled": {"model_type": "llama", "rope_scaling": SCALED, "rope_theta": 100.0, "rms_norm_eps": 1e-3},
    "llama-tied": {"model_type": "llama", "head_dim": 12, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1000.0},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, "rope_scaling": SCALED},
    "mistral": {"model_type": "mistral", "sliding_window": SEQ_LEN},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000.0}, "qwen2-tied": {"model_type": "qwen2",
        "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8},
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "qwen3-moe-step": {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 8, "decoder_sparse_step": 2},
    "glm": {"model_type": "glm4_moe", "head_dim": 16, **SHARED, "attention_bias": True, "routed_scaling_factor": 2.5},
    "glm-norm": {
        "model_type": "glm4_moe", "head_dim": 12, **SHARED, "use_qk_norm": True, "rope_scaling": SCALED,
        "norm_topk_prob": False,
    },
    "glm-groups": {
        "model_type": "glm4_moe", "head_dim": 16, **SHARED, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    },
    "dots-groups": {
        "model_type": "dots1", "head_dim": 16, **SHARED, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "llama-yarn": {"model_type": "llama", "rope_scaling": YARN, "rope_theta": 100.0},
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4.0, "truncate": False},
    },
    "arcee": {"model_type": "arcee"},
    "arcee-gelu": {"model_type": "arcee", "hidden_act": "gelu", "tie_word_embeddings": True},
    "arcee-gelu-tanh": {"model_type": "arcee", "hidden_act": "gelu_pytorch_tanh", "rope_scaling": YARN},
    "olmoe": {"model_type": "olmoe", "num_experts_per_tok": 3, "num_experts": 8},
    # Moonlight has no latent of queries, Kimi shares a single expert.
    "deepseek-v2": {"model_type": "deepseek_v2", **LATENT, **SHARED, "routed_scaling_factor": 1.5, "head_dim": 6},
    "deepseek-v2-lite": {"model_type": "deepseek_v2", **LATENT, **SHARED, "q_lora_rank": None, "head_dim": 6},
    "deepseek-v3": {"model_type": "deepseek_v3", **LATENT, **SHARED, "routed_scaling_factor": 2.5},
    "deepseek-v2-groups": {
        "model_type": "deepseek_v2", **LATENT, **SHARED, "head_dim": 6, **GROUPS, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
    },
    "deepseek-v3-groups": {
        "model_type": "deepseek_v3", **LATENT, **SHARED, **GROUPS, "routed_scaling_factor": 2.5,
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "moonlight": {
        "model_type": "deepseek_v3", **LATENT, **SHARED, "q_lora_rank": None, "routed_scaling_factor": 2.446,
        "rope_theta": 50000.0, "attention_bias": True,
    },
    "kimi": {
        "model_type": "deepseek_v3", **LATENT, **SHARED, "n_shared_experts": 1, "rope_theta": 50000.0,
        "tie_word_embeddings": True, "v_head_dim": 16, "routed_scaling_factor": 2.827,
    },
    "dots": {"model_type": "dots1", "head_dim": 16, **SHARED, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
}  # fmt: skip
THEIRS = {
    "embedding": "model.embed_tokens", "head": "lm_head", "layers": "model.layers", "norm": "model.norm",
    "attention": "self_attn", "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj",
    "ffn": "mlp", "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "router": "gate",
    "shared": "shared_experts", "balance": "gate.e_score_correction_bias",
}  # fmt: skip
"""Our name of a module -> theirs, where they differ."""
WIDE = (
    (torch, "float32", torch.float64),
    (torch, "float", torch.float64),
    (torch.Tensor, "float", torch.Tensor.double),
)
"""What makes transformers compute in fp64 whatever it computes in fp32 at any precision: norms, rotations, softmax."""


def config_json(name):
    """The values of a config.json; a copy, since transformers writes into them."""
    return SMALL | deepcopy(CONFIGS[name])


def their_name(name):
    return ".".join(THEIRS.get(part, part) for part in name.split("."))


def in_their_words(shape, tensors):
    """Tensors of our model by the names of theirs, which holds gate and up of each expert as one matrix."""
    theirs, m = {}, shape.moe_intermediate_size
    rows = {"gate": m, "up": m, "down": shape.hidden_size}
    for name, tensor in tensors.items():
        block, _, matrix = name.rpartition(".experts.")
        if not block:
            theirs[their_name(name)] = tensor
            continue
        experts, key = tensor.view(shape.num_experts, rows[matrix], -1), f"{their_name(block)}.experts."
        if matrix == "down":
            theirs[key + "down_proj"] = experts
        else:
            parts = theirs.setdefault(key + "gate_up_proj", [])
            parts.append(experts)
    return {name: torch.cat(part, 1) if isinstance(part, list) else part for name, part in theirs.items()}


def results(logits, targets, params):
    """The logits and each gradient, by names."""
    cross_entropy(logits, targets).backward()
    return {name: param.grad for name, param in params if param.grad is not None} | {"logits": logits}


def models(name):
    """Our model and theirs in fp64, from one config.json, with the same values."""
    values = config_json(name)
    shape = shape_of(values, name, name)
    torch.manual_seed(0)
    ours = Decoder(shape, split_stages(shape, 1)[0], [range(SEQ_LEN)]).double()
    for param in ours.parameters():
        # Matrices of mean 0 give activations of both signs, where their kinds differ.
        torch.nn.init.normal_(param, 0.5 if param.dim() == 1 else 0.0, 0.2)
    config = AutoConfig.for_model(**values)
    options = {"experts_implementation": "eager"} if shape.num_experts else {}
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options).double()
    state = {key: value for key, value in ours.state_dict().items() if not key.endswith("counts")}
    experts = [kind.experts for kind in shape.kinds if kind.experts]
    if (
        experts and experts[0].scoring_func == "sigmoid"
    ):  # the bias of an expert changes the choice, but no weight
        for balance in router_biases(ours).values():
            # Their order lets the best experts, and the best groups by both measures, differ.
            balance.copy_(torch.linspace(0, 0.5, shape.num_experts)[3 * torch.arange(shape.num_experts) % 8])
    else:
        state = {key: value for key, value in state.items() if not key.endswith("balance")}
    theirs.load_state_dict(in_their_words(shape, state))
    assert shape.num_params == sum(param.numel() for param in theirs.parameters())
    return ours, theirs


def differences(name):
    """`logits` and each gradient, by their names -> the largest difference from theirs; inf if only one has it."""
    ours, theirs = models(name)
    inputs, targets = torch.randint(VOCAB, (2, SEQ_LEN + 1)).unfold(1, SEQ_LEN, 1).unbind(1)
    of_us = in_their_words(ours.shape, results(ours(inputs), targets, ours.named_parameters()))
    of_them = results(theirs(inputs).logits, targets, theirs.named_parameters())
    return {
        key: float((of_us[key] - of_them[key]).detach().abs().max()) if key in of_us and key in of_them else math.inf
        for key in of_us.keys() | of_them.keys()
    }  # fmt: skip


def worst_difference(name):
    """The largest difference; it changes torch, for a process of its own."""
    for owner, attribute, value in WIDE:
        setattr(owner, attribute, value)
    return max(differences(name).values())


@pytest.fixture
def wide(monkeypatch):
    for owner, name, value in WIDE:
        monkeypatch.setattr(owner, name, value)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_decoder_is_the_model_of_its_config_json(name, wide):
    assert {key: diff for key, diff in differences(name).items() if diff >= 1e-10} == {}


FAULTS_SEEN = [
    (f, *f.cases_by_check["transformers"]) for f in FAULTS.values() if "transformers" in f.cases_by_check
]


@pytest.mark.parametrize(("fault", "name"), FAULTS_SEEN, ids=lambda value: getattr(value, "text", None))
def test_a_fault_of_the_decoder_is_seen(fault, name, wide, monkeypatch):
    monkeypatch.setattr(fault.owner, fault.name, fault.wrong(getattr(fault.owner, fault.name)))
    assert max(differences(name).values()) > 1e-7
