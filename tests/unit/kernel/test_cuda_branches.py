"""What only GPUs run, on CPUs: it computes what the CPU branches do, by calls that operators of GPUs accept."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ultrabench.kernel import compat, ep, fp8, loss, mesh, model, tp
from ultrabench.kernel import compile as compiled_layers
from ultrabench.kernel.dryrun.counts import ExecutedFlops

GPU, CPU = torch.device("cuda", 2), torch.device("cpu")
on_gpu = partial(mock.patch.object, torch.Tensor, "is_cuda", True)
"""Tensors say that they are on a GPU."""

EXPERT_COUNTS = (0, 8, 0, 5, 11, 0)
"""Rows of each expert: the first, the last and one between have none."""
INPUTS, OUTPUTS = 16, 32


def storage(tensor):
    """What is the same for a tensor and its views."""
    return tensor.untyped_storage().data_ptr()


def expert_products(dtype, on_product=lambda *_: None):
    """Outputs and gradients of two weights of each expert, and the FLOPs; `on_product` gets factors and offsets."""
    torch.manual_seed(0)
    num_experts, num_rows = len(EXPERT_COUNTS), sum(EXPERT_COUNTS)
    weights = [torch.randn(num_experts * OUTPUTS, INPUTS).to(dtype).requires_grad_() for _ in range(2)]
    rows = torch.randn(num_rows, INPUTS).to(dtype).requires_grad_()
    # Autograd may hand on gradients whose rows are no rows in memory.
    output_grads = [torch.randn(1, OUTPUTS).to(dtype).expand(num_rows, OUTPUTS) for _ in range(2)]
    experts_Tk = torch.arange(num_experts).repeat_interleave(torch.tensor(EXPERT_COUNTS))[:, None]
    alone = ep.ExpertParallel(SimpleNamespace(size=lambda: 1, rank=lambda: 0), None, [])
    route = alone._route(experts_Tk, [[*EXPERT_COUNTS]])
    ranks = SimpleNamespace(tp_ranks=SimpleNamespace(wants_input_grads=True, wants_weight_grads=True))
    with (
        ExecutedFlops() as flops,
        mock.patch.object(torch, "_grouped_mm", recorded(torch._grouped_mm, on_product)),
    ):
        outputs = ep._ExpertProducts.apply(ranks, route.expert_ends, route.expert_counts, rows, *weights)
        torch.autograd.backward(outputs, output_grads)
    tensors = [*(output.detach() for output in outputs), rows.grad, *(weight.grad for weight in weights)]
    return tensors, flops.flops, [*map(storage, weights)]


def recorded(function, on_call):
    """The function, with each call of which `on_call` gets the arguments."""

    def call(*args, **kwargs):
        on_call(*args, *kwargs.values())
        return function(*args, **kwargs)

    return call


def test_grouped_products_are_those_of_each_expert():
    """In bf16, with experts without rows, whose gradients are 0; the FLOPs are the same, and no weight is copied."""
    calls, lone = [], expert_products(torch.bfloat16)
    with on_gpu():
        grouped = expert_products(torch.bfloat16, lambda *args: calls.append(args))
        expert_products(torch.float32, lambda *_: pytest.fail("fp32 has no grouped products"))
    for result, right in zip(grouped[0], lone[0], strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, right, rtol=2**-7, atol=2**-5)
    for grad in grouped[0][3:]:
        by_expert = grad.unflatten(0, (len(EXPERT_COUNTS), -1))
        assert [bool(g.any()) for g in by_expert] == [count > 0 for count in EXPERT_COUNTS]
    products = 3 * 2  # an output, an input's gradient and a weight's gradient of two weights
    assert grouped[1] == lone[1] == products * 2 * sum(EXPERT_COUNTS) * INPUTS * OUTPUTS
    assert len(calls) == products
    read_weights = [storage(b) for _, b, _ in calls if b.dim() == 3]
    assert read_weights == grouped[2] * 2
    assert all(not a.is_contiguous() for a, b, _ in calls if b.dim() == 2), "gradients are copied"
    for a, b, ends in calls:
        assert ends.tolist() == torch.tensor(EXPERT_COUNTS).cumsum(0).tolist()
        assert ends.dtype == torch.int32, "the operator of GPUs takes no other"
        for factor in (a, b):
            assert sorted(factor.stride()[-2:])[0] == 1, "the operator of GPUs takes no other strides"


def test_norms_of_gpus_are_those_of_cpus():
    """With the eps of the shape, in at least fp32."""
    torch.manual_seed(0)
    for dtype, bound in ((torch.float64, 1e-14), (torch.bfloat16, 2**-7)):
        norm = model.RmsNorm(24, 0.1).to(dtype)
        torch.nn.init.normal_(norm.weight)
        inputs = [torch.randn(3, 5, 24).to(dtype).requires_grad_(), norm.weight]
        out, grad = norm(inputs[0]), torch.randn(3, 5, 24).to(dtype)
        with on_gpu():
            out_of_gpu = norm(inputs[0])
        expected, results = ([o, *torch.autograd.grad(o, inputs, grad)] for o in (out, out_of_gpu))
        for result, right in zip(results, expected, strict=True):
            assert (result - right).abs().max() <= bound * right.abs().max()


B, S, HEADS, KV_HEADS, WIDTH = 2, 16, 4, 2, 16
ATEN = torch.ops.aten


def attention_operators(names):
    """The operators of attention of GPUs, computed by those of CPUs; `names` gets the name of each call.

    Arguments are those of their schema. There is no dropout, and sequences have one length.
    """

    def arguments(name, args):
        schema = getattr(ATEN, name).default._schema
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
        assert named["dropout_p"] == 0.0
        assert named.get("attn_bias") is None
        assert named.get("compute_log_sumexp", True)
        names.append(name.removeprefix("_scaled_dot_product_"))
        return SimpleNamespace(**named)

    def forward(name, *args):
        given = arguments(name, args)
        out, log_sum = ATEN._scaled_dot_product_flash_attention_for_cpu(
            given.query, given.key, given.value, 0.0, given.is_causal
        )
        return out, log_sum[..., None] if "cudnn" in name else log_sum

    def backward(name, *args):
        given = arguments(name, args)
        assert (given.max_q, given.max_k) == (given.query.shape[2], given.key.shape[2])
        assert given.cum_seq_q is given.cum_seq_k is None
        assert given.logsumexp.is_contiguous()
        assert given.logsumexp.dim() == (4 if "cudnn" in name else 3)
        log_sum = given.logsumexp.view(given.query.shape[:3])
        tensors = given.grad_out, given.query, given.key, given.value, given.out, log_sum
        return ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, given.is_causal)

    return SimpleNamespace(**{
        f"_scaled_dot_product_{kind}_attention{suffix}": partial(
            function, f"_scaled_dot_product_{kind}_attention{suffix}"
        )
        for kind in ("flash", "cudnn") for suffix, function in (("", forward), ("_backward", backward))
    })  # fmt: skip


@pytest.mark.parametrize("backend", ["flash", "flash3", "cudnn"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_gpus_gets_the_arguments_of_its_operators(backend, causal):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(B, heads, S, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    if not causal:  # a rank of a ring also attends to half of the keys of another one
        k, v = (tensor[:, :, : S // 2] for tensor in (k, v))
    expected = compat.attention_forward("flash", q, k, v, causal=causal)
    expected_grads = compat.attention_backward(
        "flash", grad, q, expected[0], expected[1], k, v, causal=causal
    )
    names = []
    with on_gpu(), mock.patch.object(compat, "_aten", attention_operators(names)):
        results = compat.attention_forward(backend, q, k, v, causal=causal)
        grads = compat.attention_backward(backend, grad, q, *results, k, v, causal=causal)
    assert names == [f"{backend.rstrip('3')}_attention{suffix}" for suffix in ("", "_backward")]
    for result, right in zip((*results, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize(
    ("version", "capability", "hip", "prefers"),
    [
        (91501, (9, 0), None, True), (92000, (10, 0), None, True), (91500, (9, 0), None, False),
        (91501, (8, 0), None, False), (91501, (12, 0), None, False), (None, (9, 0), None, False),
        (91501, (9, 4), "7.0", False),
    ],
)  # fmt: skip
def test_cudnn_is_preferred_where_torch_prefers_it(monkeypatch, version, capability, hip, prefers):
    """On Hopper and Blackwell, from cuDNN 9.15.1 on."""
    monkeypatch.setattr(compat.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.version, "hip", hip)
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability
    )
    assert compat.prefers_cudnn_attention(GPU) == prefers
    assert {*asked} <= {GPU}


@pytest.mark.parametrize(
    ("device", "hip", "architecture", "dtype"),
    [
        (GPU, None, "", torch.float8_e4m3fn), (CPU, "7.0", "gfx942", torch.float8_e4m3fn),
        (GPU, "7.0", "gfx942:sramecc+:xnack-", torch.float8_e4m3fnuz), (GPU, "7.0", "gfx950", torch.float8_e4m3fn),
    ],
)  # fmt: skip
def test_the_dtype_of_8_bits_is_that_of_the_device(monkeypatch, device, hip, architecture, dtype):
    properties = {GPU: SimpleNamespace(gcnArchName=architecture)}
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    assert fp8.fp8_dtype(device) == dtype


class Group:
    """The last of two ranks of tp, of which the other one is no process."""

    def rank(self):
        return 1

    def size(self):
        return 2


def test_generated_code_of_the_loss_gets_the_ranks_of_tp():
    """It is compiled as one graph for fixed sizes, and called for every part of a softmax with this rank's columns."""
    group, options, calls = Group(), [], []

    def compiled(function, **chosen):
        options.append((function, chosen))
        return lambda logits, targets, ranks: calls.append((targets.tolist(), ranks)) or logits.sum()

    ranks = SimpleNamespace(group=group, gather=lambda x: lambda: x, scatter=lambda x: lambda: x)
    for backend in ("inductor", "aot_eager"):
        head = SimpleNamespace(loss=partial(tp._loss, ranks, 12))
        decoder = SimpleNamespace(layers={}, head=head)
        with mock.patch.object(torch, "compile", compiled):
            compiled_layers.apply_compile(decoder, SimpleNamespace(backend_name=backend))
        if backend == "aot_eager":
            assert head.loss.keywords == {}
            continue
        x, weight = torch.randn(1, 6, 4), torch.randn(6, 4)
        sizes = mock.patch.multiple(loss, MAX_CHUNK_LOGITS=24, MAX_SOFTMAX_LOGITS=12)
        with sizes, mock.patch.object(dist, "all_reduce"):
            head.loss(x, weight, torch.arange(6)[None] + 6, None)
    assert options == [(loss.logits_to_gradient, {"fullgraph": True, "dynamic": False})]
    assert calls == [([first, first + 1], group) for first in (0, 2, 4)]
    compiled_layers.apply_compile(
        SimpleNamespace(layers={}, head=None), SimpleNamespace(backend_name="inductor")
    )


def test_ranks_of_gpus_join_by_nccl_and_send_to_themselves():
    """Their group is bound to the GPU, so that NCCL can split it; gloo cannot send to its own rank."""
    with mock.patch.object(dist, "init_process_group") as join:
        for device in (GPU, CPU):
            mesh.join_process_group(device, None, 3, 4)
    facts = [(call.args[0], call.kwargs["device_id"]) for call in join.call_args_list]
    assert facts == [("nccl", GPU), ("gloo", None)]

    class Neighbours:
        def _get_init_p2p_neighbors_ops(self):
            return ["send"]

    class Stage(compat.PeerlessWarmup, Neighbours):
        def __init__(self, device):
            self.device = device

    assert [Stage(device)._get_init_p2p_neighbors_ops() for device in (GPU, CPU)] == [["send"], []]
