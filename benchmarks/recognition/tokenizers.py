"""Three tokenizers of installed packages and of the demo model, with the text span of each token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mistral_common
from tokenizers import Tokenizer

from ragcache_core.recognition import bytes_of_tokens

_ROOT = Path(__file__).resolve().parents[2]
_DATA = Path(mistral_common.__file__).parent / "data"
NAMES = ("demo", "tekken", "sentencepiece")


@dataclass(frozen=True, slots=True)
class MeasuredTokenizer:
    """A tokenizer.

    Attributes:
        encode: returns the token ids of a text, without special tokens.
        ends_of: returns for each token of a text the character at which it ends.
        token_bytes: the bytes of each token id.
    """

    encode: Callable[[str], list[int]]
    ends_of: Callable[[str], list[int]]
    token_bytes: list[bytes]


def load(name: str) -> MeasuredTokenizer:
    """Return the demo model's word pieces, Tekken's byte-level BPE, or Mistral's first SentencePiece model."""
    return {"demo": _demo, "tekken": _tekken, "sentencepiece": _sentencepiece}[name]()


def _demo() -> MeasuredTokenizer:
    tokenizer = Tokenizer.from_file(str(_ROOT / "examples" / "demo_model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
    texts = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size(with_added_tokens=True))]
    kind = "byte_level" if '"ByteLevel"' in decoder else "wordpiece"
    return MeasuredTokenizer(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        lambda text: [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets],
        bytes_of_tokens(texts, kind),  # type: ignore[arg-type]
    )


def _tekken() -> MeasuredTokenizer:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = Tekkenizer.from_file(str(_DATA / "tekken_240911.json"))
    num_special = tokenizer.num_special_tokens
    token_bytes = [b"" if i < num_special else tokenizer.id_to_byte_piece(i) for i in range(tokenizer.n_words)]

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, bos=False, eos=False))

    return MeasuredTokenizer(encode, lambda text: _ends(text, encode(text), token_bytes), token_bytes)


def _sentencepiece() -> MeasuredTokenizer:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    tokenizer = SentencePieceTokenizer(str(_DATA / "tokenizer.model.v1"))
    token_bytes = bytes_of_tokens([tokenizer.id_to_piece(i) for i in range(tokenizer.n_words)], "sentencepiece")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, False, False))

    def ends_of(text: str) -> list[int]:  # a space is put before every text
        return [max(end - 1, 0) for end in _ends(f" {text}", encode(text), token_bytes)]

    return MeasuredTokenizer(encode, ends_of, token_bytes)


def _ends(text: str, token_ids: list[int], token_bytes: list[bytes]) -> list[int]:
    """Return the character at which each token ends, by the bytes of the tokens."""
    character_at = [0]
    for index, character in enumerate(text, 1):
        character_at += [index] * len(character.encode())
    ends, at = [], 0
    for token in token_ids:
        at += len(token_bytes[token])
        ends.append(character_at[min(at, len(character_at) - 1)])
    return ends
