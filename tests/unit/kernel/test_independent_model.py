"""The decoder gives the logits and gradients of the models of transformers, which share no code with it.

Layouts are compared with the decoder on one process, so a fault of the decoder itself (no rotation, a wrong mask)
is in both; only another implementation shows it. Both models are made from the same config.json.
"""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.planted import FAULTS
from ultrabench.kernel.model import Decoder, cross_entropy
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
CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama-scaled": {"model_type": "llama", "rope_scaling": SCALED, "rope_theta": 100.0, "rms_norm_eps": 1e-3},
    "llama-tied": {"model_type": "llama", "head_dim": 12, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1000.0},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, "rope_scaling": SCALED},
    "mistral": {"model_type": "mistral", "sliding_window": SEQ_LEN},
}  # fmt: skip
THEIRS = {
    "embedding": "model.embed_tokens", "head": "lm_head", "layers": "model.layers", "norm": "model.norm",
    "attention": "self_attn", "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj",
    "ffn": "mlp", "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""Our name of a module -> theirs, where they differ."""
WIDE = (
    (torch, "float32", torch.float64),
    (torch, "float", torch.float64),
    (torch.Tensor, "float", torch.Tensor.double),
)
"""What makes transformers compute in fp64 whatever it computes in fp32 at any precision: norms, rotations, softmax."""


def their_name(name):
    return ".".join(THEIRS.get(part, part) for part in name.split("."))


def found(logits, targets, params):
    """The logits and each gradient, by names."""
    cross_entropy(logits, targets).backward()
    return {"logits": logits} | {name: param.grad for name, param in params if param.grad is not None}


def differences(name):
    """`logits` and each gradient, by their names -> the largest difference from theirs; inf if only one has it."""
    values = SMALL | CONFIGS[name]
    shape = shape_of(values, name, name)
    torch.manual_seed(0)
    inputs, targets = torch.randint(VOCAB, (2, SEQ_LEN + 1)).unfold(1, SEQ_LEN, 1).unbind(1)
    ours = Decoder(shape, split_stages(shape, 1)[0], [range(SEQ_LEN)]).double()
    for param in ours.parameters():
        torch.nn.init.normal_(param, 0.5, 0.2)
    config = AutoConfig.for_model(**values)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    theirs.load_state_dict({their_name(key): value for key, value in ours.state_dict().items()})
    got = found(ours(inputs), targets, ((their_name(key), param) for key, param in ours.named_parameters()))
    wanted = found(theirs(inputs).logits, targets, theirs.named_parameters())
    return {
        key: float((got[key] - wanted[key]).detach().abs().max()) if key in got and key in wanted else math.inf
        for key in got.keys() | wanted.keys()
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
    (fault, *fault.seen["transformers"]) for fault in FAULTS.values() if "transformers" in fault.seen
]


@pytest.mark.parametrize(("fault", "name"), FAULTS_SEEN, ids=lambda value: getattr(value, "text", None))
def test_a_fault_of_the_decoder_is_seen(fault, name, wide, monkeypatch):
    monkeypatch.setattr(fault.owner, fault.name, fault.wrong(getattr(fault.owner, fault.name)))
    assert max(differences(name).values()) > 1e-6
