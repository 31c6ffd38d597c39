"""A Llama for training: the architecture of `transformers.LlamaForCausalLM`, in few lines.

Grouped-query attention, rotary positions in the half-split layout, RMSNorm before each sub-layer and a
SwiGLU network. Positions are given explicitly, so training can leave random gaps between documents.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    vocabulary_size: int
    width: int = 192
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_width: int = 64
    feed_forward_width: int = 448
    rope_theta: float = 1e5
    norm_epsilon: float = 1e-5

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self)


def rope_table(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles.

    positions: [batch, length], int64. Both results: [batch, 1, length, head_width], float32.
    """
    exponents = torch.arange(0, config.head_width, 2, device=positions.device).float() / config.head_width
    inverse = 1.0 / config.rope_theta**exponents
    angles = positions.float()[:, :, None] * inverse
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


class Block(nn.Module):
    """One layer. Head `h` reads KV head `h // (num_heads // num_kv_heads)`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, head_width = config.width, config.head_width
        self.attention_norm = nn.RMSNorm(width, eps=config.norm_epsilon)
        self.feed_forward_norm = nn.RMSNorm(width, eps=config.norm_epsilon)
        self.query = nn.Linear(width, config.num_heads * head_width, bias=False)
        self.key = nn.Linear(width, config.num_kv_heads * head_width, bias=False)
        self.value = nn.Linear(width, config.num_kv_heads * head_width, bias=False)
        self.output = nn.Linear(config.num_heads * head_width, width, bias=False)
        self.gate = nn.Linear(width, config.feed_forward_width, bias=False)
        self.up = nn.Linear(width, config.feed_forward_width, bias=False)
        self.down = nn.Linear(config.feed_forward_width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, length, width]; cos, sin: [batch, 1, length, head_width]. Returns the shape of x."""
        config = self.config
        batch, length, _ = x.shape
        h = self.attention_norm(x)
        query = self.query(h).view(batch, length, config.num_heads, config.head_width).transpose(1, 2)
        key = self.key(h).view(batch, length, config.num_kv_heads, config.head_width).transpose(1, 2)
        value = self.value(h).view(batch, length, config.num_kv_heads, config.head_width).transpose(1, 2)
        query = (query * cos + _rotate_half(query) * sin).to(value.dtype)
        key = (key * cos + _rotate_half(key) * sin).to(value.dtype)
        repeats = config.num_heads // config.num_kv_heads
        attended = F.scaled_dot_product_attention(
            query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), is_causal=True
        )
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, -1))
        h = self.feed_forward_norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class DemoLlama(nn.Module):
    """The language model, with an output head of its own (not tied to the embedding)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            deviation = 0.02 if name.startswith(("embedding", "head")) else parameter.shape[1] ** -0.5
            if name.endswith(("output.weight", "down.weight")):
                deviation /= math.sqrt(2 * config.num_layers)
            nn.init.normal_(parameter, 0.0, deviation)

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the normalised last hidden states [batch, length, width]; ids, positions: [batch, length]."""
        cos, sin = rope_table(self.config, positions)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        result: Tensor = self.norm(x)
        return result

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [batch, length, vocabulary_size]."""
        result: Tensor = self.head(self.hidden(ids, positions))
        return result
