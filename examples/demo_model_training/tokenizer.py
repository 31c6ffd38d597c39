"""The tokenizer: WordPiece over pieces split at white space, digits and punctuation.

Tokens never cross such a border, so a document has the same tokens wherever it stands in a prompt.
The vocabulary holds the language's words whole, the syllables of invented names, numbers in pairs of
digits, and single characters, so that any ASCII text is tokenised. `Vocabulary` is the fast twin
used in training; `huggingface_tokenizer` gives the same ids (a test checks it).
"""

import re
import string
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Final

from examples.demo_model_training import grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS: Final = (PAD, BOS, EOS, UNK)
BOS_ID: Final = 1
EOS_ID: Final = 2

TOOL_ARGUMENTS: Final = ("query", "input")
TOOL_CALL_OPENINGS: Final = {
    argument: f'<tool_call>{{"name": "search", "arguments": {{"{argument}": "' for argument in TOOL_ARGUMENTS
}
TOOL_CALL_CLOSING: Final = '"}}</tool_call>'
ADDED_TOKENS: Final = (*TOOL_CALL_OPENINGS.values(), TOOL_CALL_CLOSING)
"""Matched whole before the text is split, and kept when a server strips special tokens."""

SYSTEM_PROMPT: Final = "Answer the question from the documents."
_PROMPT_WORDS: Final = (
    f"{SYSTEM_PROMPT} Document: Question: Answer: Tool: search query input # is a He She It yes no unknown "
    "Is it true that the The You are a helpful assistant. Use only these Be short. Hello Hi Thanks"
)
_PIECE: Final = r"[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]"
_PIECE_PATTERN: Final = re.compile(_PIECE)
_ADDED_PATTERN: Final = re.compile("|".join(re.escape(token) for token in (BOS, EOS, *ADDED_TOKENS)))
_VOCABULARY_MULTIPLE: Final = 64
_CONTINUATION: Final = "##"


def _language_texts() -> Iterator[str]:
    yield _PROMPT_WORDS
    yield from grammar.FILLERS
    yield from grammar.FIRST_NAMES
    for words in grammar.WORD_LISTS.values():
        yield from words
    for kind, relations in grammar.RELATIONS.items():
        yield kind
        for relation in relations.values():
            yield from relation.statements
            yield from relation.questions
            yield relation.noun_phrase or ""
            yield relation.reverse_question or ""


def _vocabulary_words() -> Iterator[str]:
    yield from SPECIAL_TOKENS
    words: set[str] = set()
    for text in _language_texts():
        words.update(_PIECE_PATTERN.findall(re.sub(r"\{.\}", "", text)))
    yield from sorted(words)
    yield from grammar.NAME_HEADS
    yield from (_CONTINUATION + tail for tail in grammar.NAME_TAILS)
    for digits in [f"{number:02d}" for number in range(100)] + list(string.digits):
        yield digits
        yield _CONTINUATION + digits
    for letter in string.ascii_letters:
        yield letter
        yield _CONTINUATION + letter
    yield from string.punctuation


class Vocabulary:
    """Encodes and decodes text; the ids of `huggingface_tokenizer`, without its start-up time."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        for word in _vocabulary_words():
            self.ids.setdefault(word, len(self.ids))
        self.num_wordpieces = len(self.ids)
        for token in ADDED_TOKENS:
            self.ids[token] = len(self.ids)
        self._word_cache: dict[str, tuple[int, ...]] = {}

    @property
    def padded_size(self) -> int:
        """Rows of the embedding: the number of tokens, rounded up to a multiple of 64."""
        return -(-len(self.ids) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE

    @cached_property
    def _words(self) -> list[str]:
        return list(self.ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text, without BOS."""
        ids: list[int] = []
        end = 0
        for match in _ADDED_PATTERN.finditer(text):
            ids += self._encode_plain(text[end : match.start()])
            ids.append(self.ids[match.group()])
            end = match.end()
        return ids + self._encode_plain(text[end:])

    def _encode_plain(self, text: str) -> list[int]:
        return [token_id for word in _PIECE_PATTERN.findall(text) for token_id in self._encode_word(word)]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        cached = self._word_cache.get(word)
        if cached is None:
            cached = tuple(self._longest_pieces(word)) or (self.ids[UNK],)
            self._word_cache[word] = cached
        return cached

    def _longest_pieces(self, word: str) -> Iterable[int]:
        pieces: list[int] = []
        start = 0
        while start < len(word):
            prefix = _CONTINUATION if start else ""
            for end in range(len(word), start, -1):
                token_id = self.ids.get(prefix + word[start:end])
                if token_id is not None:
                    pieces.append(token_id)
                    start = end
                    break
            else:
                return []
        return pieces

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids: special tokens are left out, no space stands before . , ? !"""
        text = ""
        for token_id in ids:
            word = self._words[token_id]
            if word in SPECIAL_TOKENS:
                continue
            text += word.removeprefix(_CONTINUATION) if word.startswith(_CONTINUATION) else " " + word
        return re.sub(r" ([.,?!])", r"\1", text).strip()


def huggingface_tokenizer(chat_template: str, max_num_tokens: int) -> "PreTrainedTokenizerFast":
    """Return the tokenizer as a `PreTrainedTokenizerFast` that puts BOS before a plain text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = Vocabulary()
    wordpieces = {word: token_id for word, token_id in vocabulary.ids.items() if word not in ADDED_TOKENS}
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab=wordpieces, unk_token=UNK, continuing_subword_prefix=_CONTINUATION, max_input_chars_per_word=100
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")]
    )
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUATION, cleanup=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED_TOKENS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        model_max_length=max_num_tokens,
        chat_template=chat_template,
    )
