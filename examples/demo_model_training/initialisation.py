"""A structured start: the attention heads that reading needs are wired before training begins.

Answering from documents is a chain of steps: know the previous tokens, know which entry one stands
in, find the sentence that shares the question's words, copy what follows. From random weights the
first steps get no gradient before the last ones work, and a small model learns nothing in an hour.
Here every step is wired roughly and training refines it.

    residual stream of width d, as it leaves the embedding and layer 0

    0         1        2                content        content+bag          d
    | constant | anchor | random token    | bag of the     | previous tokens |
    |          |  flag  | code            | last tokens    |                 |

    layer 0   group 0  previous-token heads (offsets 1 and 2) write into "previous tokens";
                       a query that turns the constant by `offset` radians per frequency
                       meets a constant key exactly `offset` tokens back
              group 1  bag heads: a soft window of about a dozen tokens, into "bag"
    layer 1   group 0  induction heads: my token = the previous token there, copy that token
              group 1  anchor heads: the nearest entry start ("X is a company") or question start;
                       adds ITS bag, so a sentence that says only "It" carries the name X
    layer 2+           bag-match heads: my bag (the question) = the bag there; copy that token

The source of the idea: mimetic initialisation (Trockman and Kolter, 2023) and the induction circuit
(Olsson et al., 2022). Copied tokens go through a random rotation into the space the output head reads,
so that a copied token and the token at hand do not get mixed up.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from examples.demo_model_training.grammar import ENTITY_KINDS
from examples.demo_model_training.model import Block, DemoLlama
from examples.demo_model_training.tokenizer import Vocabulary

ANCHOR_WORDS: Final = (*ENTITY_KINDS, "Question", "Answer")

_CONSTANT, _ANCHOR, _FIRST_CODE = 0, 1, 2
_PREVIOUS_WIDTH: Final = 32
_BAG_WIDTH: Final = 64
_QUIET: Final = 0.05
"""Factor on the random weights around a wired head."""

_PREVIOUS_FREQUENCIES: Final = range(8)
_BAG_FREQUENCIES: Final = range(4, 10)
_ANCHOR_FREQUENCIES: Final = range(11, 17)
"""Rotary frequencies: the first tell neighbours apart, the middle ones fade over a dozen tokens, the
last over a hundred and more (rope_theta 1e5, head width 64)."""

_PREVIOUS_SCORE: Final = 30.0
_BAG_SCORE: Final = 4.8
_ANCHOR_SCORE: Final = 14.0
"""Attention scores, in nats, at the place each head looks for."""

_INDUCTION_SCALE: Final = 3.0
_BAG_MATCH_SCALE: Final = 2.0


def _orthonormal(num_rows: int, num_columns: int) -> Tensor:
    """Return a random matrix with orthonormal columns (rows if it is wide)."""
    basis: Tensor = torch.linalg.qr(torch.randn(max(num_rows, num_columns), min(num_rows, num_columns)))[0]
    return basis if num_rows >= num_columns else basis.T


@dataclass(frozen=True, slots=True)
class _Wiring:
    """Sizes and the shared random projections. D = width, H = head width, C = end of the token code."""

    model: DemoLlama
    constant: float
    """Value of the constant dimension; RMSNorm leaves it about as large."""
    content_end: int
    group_size: int
    rotation: Tensor
    """[D, D], from the token code to the space the output head reads."""
    previous_value: Tensor
    """[H, D], what a previous-token head reads of a token."""
    previous_output: Tensor
    """[D, H], where it writes that."""

    def query_heads(self, group: int) -> list[slice]:
        width = self.model.config.head_width
        heads = range(group * self.group_size, (group + 1) * self.group_size)
        return [slice(head * width, (head + 1) * width) for head in heads]

    def kv_head(self, group: int) -> slice:
        width = self.model.config.head_width
        return slice(group * width, (group + 1) * width)

    @property
    def slow_dimensions(self) -> Tensor:
        """Head dimensions that the rotary embedding turns slowly: content can be compared there."""
        width = self.model.config.head_width
        half = width // 2
        return torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, width)])

    def position_amplitude(self, score: float, num_frequencies: int) -> float:
        """Return the weight with which constant query and constant key reach `score`."""
        scale = math.sqrt(self.model.config.head_width)
        return math.sqrt(score * scale / num_frequencies) / self.constant


def _wiring(model: DemoLlama) -> _Wiring:
    config = model.config
    content_end = config.width - _PREVIOUS_WIDTH - _BAG_WIDTH
    if content_end < _PREVIOUS_WIDTH + _FIRST_CODE or config.head_width < _BAG_WIDTH:
        raise ValueError(
            f"the structured start needs width >= {2 * _PREVIOUS_WIDTH + _BAG_WIDTH + _FIRST_CODE} and head width >= "
            f"{_BAG_WIDTH}, got {config.width} and {config.head_width}"
        )
    previous_value = torch.zeros(config.head_width, config.width)
    previous_value[:_PREVIOUS_WIDTH, _FIRST_CODE:content_end] = _orthonormal(_PREVIOUS_WIDTH, content_end - _FIRST_CODE)
    previous_output = torch.zeros(config.width, config.head_width)
    previous_output[-_PREVIOUS_WIDTH:, :_PREVIOUS_WIDTH] = _orthonormal(_PREVIOUS_WIDTH, _PREVIOUS_WIDTH)
    return _Wiring(
        model=model,
        constant=0.5 * math.sqrt(config.width),
        content_end=content_end,
        group_size=config.num_heads // config.num_kv_heads,
        rotation=_orthonormal(config.width, config.width),
        previous_value=previous_value,
        previous_output=previous_output,
    )


@torch.no_grad()
def initialise(model: DemoLlama, vocabulary: Vocabulary) -> None:
    """Wire the model's embedding, output head and attention heads in place."""
    wiring = _wiring(model)
    _wire_embedding(wiring, vocabulary)
    first, second, *later = (block for block in model.blocks if isinstance(block, Block))
    _wire_previous_token_heads(wiring, first)
    _wire_bag_heads(wiring, first)
    _wire_induction_heads(wiring, second)
    _wire_anchor_heads(wiring, second)
    copied = _random_code(wiring)
    for block in later:
        _wire_copying(wiring, block, 0, copied)
        for group in range(model.config.num_kv_heads):
            _wire_bag_match(wiring, block, group)


@torch.no_grad()
def grow(model: DemoLlama, trained: DemoLlama) -> None:
    """Make the model, in place, of a trained one with fewer layers and the same widths: each layer becomes several.

    Every one of them adds an equal part of what the trained layer added. So they say roughly what the trained model
    said, all of them work from the first step of training on, and what they pass on grows apart. (Layers that add
    nothing at first say exactly the same, but were still of no use after 600 steps.)
    """
    depth, num_trained = model.config.num_layers, trained.config.num_layers
    if replace(trained.config, num_layers=depth) != model.config or depth < num_trained:
        raise ValueError(f"a model of {trained.config} cannot grow into one of {model.config}: only into more layers")
    for outer in ("embedding", "norm", "head"):
        getattr(model, outer).load_state_dict(getattr(trained, outer).state_dict())
    origins = [place * num_trained // depth for place in range(depth)]
    for block, origin in zip(model.blocks, origins, strict=True):
        block.load_state_dict(trained.blocks[origin].state_dict())
        if isinstance(block, Block):
            block.output.weight /= origins.count(origin)
            block.down.weight /= origins.count(origin)


def _random_code(wiring: _Wiring) -> Tensor:
    """Return [D, H]: the directions of the token code that one copying head carries."""
    config = wiring.model.config
    code = torch.zeros(config.width, config.head_width)
    code[_FIRST_CODE : wiring.content_end] = _orthonormal(wiring.content_end - _FIRST_CODE, config.head_width)
    return code


def _wire_embedding(wiring: _Wiring, vocabulary: Vocabulary) -> None:
    embedding = wiring.model.embedding.weight
    embedding.normal_(0.0, 1.0)
    embedding[:, wiring.content_end :] *= _QUIET
    embedding[:, :_FIRST_CODE] = 0.0
    wiring.model.head.weight.copy_(0.04 * embedding @ wiring.rotation.T)
    embedding[:, _CONSTANT] = wiring.constant
    for word in ANCHOR_WORDS:
        embedding[vocabulary.ids[word], _ANCHOR] = wiring.constant


def _wire_previous_token_heads(wiring: _Wiring, block: Block) -> None:
    config = wiring.model.config
    half = config.head_width // 2
    frequencies = torch.tensor(list(_PREVIOUS_FREQUENCIES))
    turns = 1.0 / config.rope_theta ** (frequencies.float() / half)
    amplitude = wiring.position_amplitude(_PREVIOUS_SCORE, len(frequencies))
    key = block.key.weight[wiring.kv_head(0)]
    key *= _QUIET
    key[frequencies, _CONSTANT] = amplitude
    block.value.weight[wiring.kv_head(0)] = wiring.previous_value
    for offset, head in enumerate(wiring.query_heads(0), start=1):
        query = block.query.weight[head]
        query *= _QUIET
        query[frequencies, _CONSTANT] = amplitude * torch.cos(turns * offset)
        query[frequencies + half, _CONSTANT] = -amplitude * torch.sin(turns * offset)
        block.output.weight[:, head] = wiring.previous_output


def _wire_bag_heads(wiring: _Wiring, block: Block) -> None:
    config = wiring.model.config
    frequencies = torch.tensor(list(_BAG_FREQUENCIES))
    amplitude = wiring.position_amplitude(_BAG_SCORE, len(frequencies))
    key = block.key.weight[wiring.kv_head(1)]
    key *= _QUIET
    key[frequencies, _CONSTANT] = amplitude
    block.value.weight[wiring.kv_head(1)] = _random_code(wiring).T
    written = torch.zeros(config.width, config.head_width)
    written[wiring.content_end : wiring.content_end + _BAG_WIDTH, :_BAG_WIDTH] = 2.0 * torch.eye(_BAG_WIDTH)
    for head in wiring.query_heads(1):
        query = block.query.weight[head]
        query *= _QUIET
        query[frequencies, _CONSTANT] = amplitude
        block.output.weight[:, head] = written / wiring.group_size


def _wire_induction_heads(wiring: _Wiring, block: Block) -> None:
    config = wiring.model.config
    slow = wiring.slow_dimensions
    spread = torch.zeros(config.head_width, config.head_width)
    spread[slow, :_PREVIOUS_WIDTH] = _orthonormal(_PREVIOUS_WIDTH, _PREVIOUS_WIDTH)[: len(slow)]
    for head in wiring.query_heads(0):
        block.query.weight[head] = _INDUCTION_SCALE * spread @ wiring.previous_value
    block.key.weight[wiring.kv_head(0)] = _INDUCTION_SCALE * spread @ wiring.previous_output.T
    _wire_copying(wiring, block, 0, _random_code(wiring), gain=1.5)


def _wire_anchor_heads(wiring: _Wiring, block: Block) -> None:
    config = wiring.model.config
    frequencies = torch.tensor(list(_ANCHOR_FREQUENCIES))
    amplitude = wiring.position_amplitude(_ANCHOR_SCORE, len(frequencies))
    bag = slice(wiring.content_end, wiring.content_end + _BAG_WIDTH)
    key = block.key.weight[wiring.kv_head(1)]
    key *= _QUIET
    key[frequencies, _ANCHOR] = amplitude
    value = torch.zeros(config.head_width, config.width)
    value[:_BAG_WIDTH, bag] = torch.eye(_BAG_WIDTH)
    block.value.weight[wiring.kv_head(1)] = value
    for head in wiring.query_heads(1):
        query = block.query.weight[head]
        query *= _QUIET
        query[frequencies, _CONSTANT] = amplitude
        block.output.weight[:, head] = 1.5 * value.T / wiring.group_size


def _wire_copying(wiring: _Wiring, block: Block, group: int, code: Tensor, gain: float = 1.0) -> None:
    block.value.weight[wiring.kv_head(group)] = code.T
    for head in wiring.query_heads(group):
        block.output.weight[:, head] = gain * wiring.rotation @ code


def _wire_bag_match(wiring: _Wiring, block: Block, group: int) -> None:
    config = wiring.model.config
    slow = wiring.slow_dimensions
    bag = torch.zeros(config.head_width, config.width)
    bag[:_BAG_WIDTH, wiring.content_end : wiring.content_end + _BAG_WIDTH] = torch.eye(_BAG_WIDTH)
    spread = torch.zeros(config.head_width, config.head_width)
    spread[slow] = _orthonormal(config.head_width, config.head_width)[: len(slow)]
    block.key.weight[wiring.kv_head(group)] = _BAG_MATCH_SCALE * spread @ bag
    for head in wiring.query_heads(group):
        block.query.weight[head] = _BAG_MATCH_SCALE * spread @ bag + 0.3 * block.query.weight[head]
