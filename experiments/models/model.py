"""A small decoder-only transformer over bytes, whose forward pass sees its weights in BF16.

The weights themselves are FP32 masters. Every forward pass rounds them to BF16 and lets the gradient
through unchanged (straight through), so a change of a weight that its BF16 cast does not show is
invisible to the forward pass: the situation that PULSELoCo's gate is made for. On a GPU the arithmetic
is BF16 too (autocast); on a CPU it is FP32, because CPU autocast is some 20 times slower.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from experiments.settings.config import TransformerConfig

VOCABULARY = 256  # one token per byte
Past = list[tuple[Tensor, Tensor]]  # each block's keys and values, [batch, heads, time, dim / heads]


class _RoundToBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].to(ctx.dtype)


def bf16(weight: Tensor) -> Tensor:
    """`weight` as the forward pass sees it: rounded to BF16, with the identity as its gradient."""
    return _RoundToBf16.apply(weight)  # type: ignore[no-any-return]


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, bf16(self.weight))


class RmsNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, bf16(self.weight))


class Block(nn.Module):
    """Attention, then an MLP, each behind a norm and added to the stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = RmsNorm(config.dim)
        self.qkv = Linear(config.dim, 3 * config.dim, bias=False)
        self.attention_out = Linear(config.dim, config.dim, bias=False)
        self.mlp_norm = RmsNorm(config.dim)
        self.mlp_in = Linear(config.dim, 4 * config.dim, bias=False)
        self.mlp_out = Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [batch, time, dim], and the keys and values so far; `past` is those before x."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, time, dim / heads]
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")), (k, v)


class ByteTransformer(nn.Module):
    """Bytes in, the next byte's logits out."""

    end = ord("\n")  # ends an answer

    def __init__(self, config: TransformerConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config, self.context = config, config.context
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, config.dim))  # also the output layer
        self.position = nn.Parameter(torch.empty(config.context, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.dim)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        residual_scale = 1 / math.sqrt(2 * self.config.layers)  # keeps the stream's size with depth
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            scale = self.config.dim**-0.5
            if name.endswith(("attention_out.weight", "mlp_out.weight")):
                scale *= residual_scale
            nn.init.normal_(parameter, std=scale, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] -> [batch, time, 256] FP32."""
        return self._run(tokens, None)[0].float()

    def extend(self, tokens: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """The logits after the last token, [batch, 256], and what later tokens need of all so far.

        `tokens` are those behind `past`: any number at the start (None), then one at a time.
        """
        if past is not None and tokens.shape[1] != 1:
            raise ValueError(f"one token at a time behind a past, got {tokens.shape[1]}")
        logits, past = self._run(tokens, past)
        return logits[:, -1].float(), past

    def select(self, past: Past, rows: Tensor) -> Past:
        """These sequences of the batch, each as often as it is named."""
        return [(k[rows], v[rows]) for k, v in past]

    def renewed(self, past: Past) -> Past:
        return past  # every call reads the weights

    @property
    def checkpoint(self) -> nn.Module:
        return self

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def _run(self, tokens: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        start = past[0][0].shape[2] if past else 0
        now: Past = []
        on_gpu = tokens.device.type == "cuda"
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=on_gpu):
            table = bf16(self.embedding)
            x = F.embedding(tokens.long(), table) + bf16(self.position)[start : start + tokens.shape[1]]
            for k, block in enumerate(self.blocks):
                x, kept = block(x, past[k] if past else None)
                now.append(kept)
            return F.linear(self.norm(x), table), now
