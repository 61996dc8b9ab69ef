"""The same decoder written with torch alone in the usual way, with whose speed the kernel is compared."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ultrabench.model_shape import ModelShape


class Block(nn.Module):
    """One layer: attention and SwiGLU, with the norms of torch."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        h, kv = shape.hidden_size, shape.kv_width
        self.width, self.norm1, self.norm2 = shape.head_width, nn.RMSNorm(h), nn.RMSNorm(h)
        self.q, self.k, self.v, self.o = (nn.Linear(h, n, bias=False) for n in (h, kv, kv, h))
        f = shape.intermediate_size
        self.gate, self.up = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        grouped = q.shape[1] != k.shape[1]
        mixed = functional.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=grouped
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Plain(nn.Module):
    """The whole model, which computes the mean loss from tokens and targets."""

    def __init__(self, shape: ModelShape, seq_len: int) -> None:
        super().__init__()
        h = shape.hidden_size
        self.embedding, self.norm = nn.Embedding(shape.vocab_size, h), nn.RMSNorm(h)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.head = nn.Linear(h, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        angle = torch.outer(
            torch.arange(seq_len),
            shape.rope_theta ** (-torch.arange(0, shape.head_width, 2) / shape.head_width),
        ).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class PlainStep:
    """Runs optimizer steps in the usual way of torch; `form` is single, ddp or fsdp2."""

    def __init__(
        self,
        shape: ModelShape,
        seq_len: int,
        form: str,
        precision: str,
        device: torch.device,
        *,
        compiled: bool,
    ) -> None:
        self.device, self.half = device, precision == "bf16" and form != "fsdp2"
        with device:
            model: nn.Module = Plain(shape, seq_len)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        if compiled:
            for block in model.blocks:
                block.compile()
        if form == "ddp":
            model = DistributedDataParallel(model)
        if form == "fsdp2":
            policy = MixedPrecisionPolicy()
            if precision == "bf16":
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Runs one step; returns its loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())
