"""Find texts in the tokens of a prompt, for clients that name documents by text.

The bytes of the prompt's tokens are compared with the text's, without white space, which tokenizers put into tokens,
leave out or add::

    tokens    [<s>] [Doc] [:] [ Zor] [val] [ was] [ a] [ town] [.] [\\n\\n] [Question]
    bytes            Doc   :    Zor   val    was    a    town   .            Question
    text                        Z o r v a l w a s a t o w n .
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragcache_core.recognition.forms import text_forms

_MAX_MISSES = 16
_MAX_OTHERS = 4096
_MAX_CHARS_PER_TOKEN = 16
# Of a prompt: texts that it does not show as they are, other occurrences, and characters that are tokenised for them.
# Beyond these limits a text counts as not shown, so that no request holds up the others of its server.
_WHITE_SPACE = b" \t\n\r\x0b\x0c"


class PromptTexts:
    """Finds texts in prompts of one tokenizer.

    Args:
        token_bytes: the bytes of each token id; ``None`` where the tokenizer does not tell them.
        encode: returns the token ids of a text, for texts whose bytes are not found: a tokenizer may change letters.
    """

    def __init__(self, token_bytes: Sequence[bytes] | None, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._bytes = None if token_bytes is None else [*(_without_space(each) for each in token_bytes), b""]
        self._sizes = np.array([len(each) for each in self._bytes or ()], np.int64)

    def find(self, token_ids: Sequence[int], texts: Iterable[tuple[str, int]]) -> list[tuple[int, int] | None]:
        """Return the spans of texts in a prompt, given in prompt order.

        Args:
            token_ids: the prompt.
            texts: each as the prompt shows it, and how many of its occurrences after the text before are others: a
                quotation in an answer, or a short text within a word.

        Returns:
            For each text its tokens ``[start, end)``, without overlap, or ``None`` if the prompt does not show it. A
            token that straddles a boundary belongs to what holds its last character.
        """
        prompt = _Bytes.of(self._bytes, self._sizes, token_ids)
        haystack: bytes | None = None
        found: list[tuple[int, int] | None] = []
        position, num_misses, others_left = 0, 0, _MAX_OTHERS
        chars_left = _MAX_CHARS_PER_TOKEN * len(token_ids)
        for text, num_others in texts:
            place = None
            others_left -= num_others
            if prompt is not None and others_left >= 0:
                place = prompt.place_of(text, num_others, position)
                if place is None and num_misses < _MAX_MISSES:  # a template may show it as JSON
                    num_misses += 1
                    forms = (prompt.place_of(form, num_others, position) for form in text_forms(text)[1:])
                    place = next((each for each in forms if each is not None), None)
            if place is None and not num_others and len(text) <= chars_left:
                chars_left -= len(text)
                haystack = array("I", token_ids).tobytes() if haystack is None else haystack
                place = _place_of_tokens(list(self._encode(text.strip())), haystack, token_ids, position)
            found.append(place)
            position = position if place is None else place[1]
        return found


def _without_space(data: bytes) -> bytes:
    return data.translate(None, _WHITE_SPACE)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The bytes of a prompt without white space, and the end of each token in them."""

    shown: bytes
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, known: Sequence[bytes] | None, sizes: NDArray[np.int64], token_ids: Sequence[int]) -> _Bytes | None:
        """Return the bytes of ``token_ids``; ``None`` if unknown. Unknown ids have no bytes."""
        if known is None:
            return None
        last = len(known) - 1
        ids = np.asarray(token_ids, np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < last:
            ids = np.where((ids < 0) | (ids >= last), last, ids)
            token_ids = ids.tolist()
        return cls(b"".join(map(known.__getitem__, token_ids)), np.cumsum(sizes[ids]))

    def place_of(self, text: str, num_others: int, position: int) -> tuple[int, int] | None:
        """Return the token span of ``text`` from token ``position`` on, after ``num_others`` other occurrences."""
        needle, ends = _without_space(text.encode("utf-8", "replace")), self.ends
        at = self.shown.find(needle, int(ends[position - 1]) if position else 0) if needle else -1
        for _ in range(num_others):
            at = self.shown.find(needle, at + len(needle)) if at >= 0 else -1
        if at < 0:
            return None
        start = int(np.searchsorted(ends, at, "right"))
        end = int(np.searchsorted(ends, at + len(needle)))
        is_whole = end < len(ends) and int(ends[end]) == at + len(needle)
        place = max(start, position), end + is_whole
        return place if place[0] < place[1] else None


def _place_of_tokens(
    ids: Sequence[int], haystack: bytes, token_ids: Sequence[int], position: int
) -> tuple[int, int] | None:
    """Return the token span of a text from ``position`` on; its edge tokens may be merged with adjacent text.

    ``haystack`` holds ``token_ids`` as 32-bit numbers.
    """
    edge = 1 if len(ids) > 4 else 0
    core = array("I", ids[edge : len(ids) - edge]).tobytes()
    size = array("I").itemsize
    at = haystack.find(core, position * size) if core else -1
    while at >= 0 and at % size:
        at = haystack.find(core, at + 1)
    if at < 0:
        return None
    start, end = at // size, (at + len(core)) // size
    start -= bool(edge and start > position and token_ids[start - 1] == ids[0])
    end += bool(edge and end < len(token_ids) and token_ids[end] == ids[-1])
    return start, end
