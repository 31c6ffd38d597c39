"""Texts in the tokens of a prompt that shows them, for clients that name their documents by text.

The bytes of the prompt's tokens are compared with the text's, without white space, which tokenizers put into tokens,
leave out or add::

    tokens    [<s>] [Doc] [:] [ Zor] [val] [ was] [ a] [ town] [.] [\\n\\n] [Question]
    bytes            Doc   :    Zor   val    was    a    town   .            Question
    text                        Z o r v a l w a s a t o w n .
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from ragcache_core.recognition.forms import text_forms

_WHITE_SPACE = b" \t\n\r\x0b\x0c"


class ShownTexts:
    """Finds texts in prompts of one tokenizer.

    Args:
        token_bytes: the bytes of each token id; ``None`` where the tokenizer does not tell them.
        encode: returns the token ids of a text, for texts whose bytes are not found: a tokenizer may change letters.
    """

    def __init__(self, token_bytes: Sequence[bytes] | None, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._bytes = None if token_bytes is None else [_without_space(each) for each in token_bytes]

    def find(self, token_ids: Sequence[int], texts: Iterable[tuple[str, int]]) -> list[tuple[int, int] | None]:
        """Return where a prompt shows texts, which are in the order of the prompt.

        Args:
            token_ids: the prompt.
            texts: each as the prompt shows it, and how many of its occurrences after the text before are others: a
                quotation in an answer, or a short text within a word.

        Returns:
            For each text its tokens ``[start, end)``, without overlap, or ``None`` if the prompt does not show it. A
            token that straddles a boundary belongs to what holds its last character.
        """
        known = self._bytes
        parts = [known[token] if 0 <= token < len(known) else b"" for token in token_ids] if known is not None else []
        ends, shown = list(accumulate(map(len, parts))), b"".join(parts)
        haystack: bytes | None = None
        found: list[tuple[int, int] | None] = []
        position = 0
        for text, num_others in texts:
            forms = () if known is None else text_forms(text)
            needles = (_without_space(form.encode("utf-8", "replace")) for form in forms)
            places = (_place_of(needle, num_others, shown, ends, position) for needle in needles)
            place = next((each for each in places if each is not None), None)
            if place is None and not num_others:
                haystack = array("I", token_ids).tobytes() if haystack is None else haystack
                place = _place_of_tokens(list(self._encode(text.strip())), haystack, token_ids, position)
            found.append(place)
            position = position if place is None else place[1]
        return found


def _without_space(data: bytes) -> bytes:
    return data.translate(None, _WHITE_SPACE)


def _place_of(
    needle: bytes, num_others: int, shown: bytes, ends: Sequence[int], position: int
) -> tuple[int, int] | None:
    """Return the tokens of ``needle`` from the token ``position`` on, after ``num_others`` other occurrences."""
    at = shown.find(needle, ends[position - 1] if position else 0) if needle else -1
    for _ in range(num_others):
        at = shown.find(needle, at + len(needle)) if at >= 0 else -1
    if at < 0:
        return None
    start, end = bisect_right(ends, at), bisect_left(ends, at + len(needle))
    is_whole = end < len(ends) and ends[end] == at + len(needle)
    place = max(start, position), end + is_whole
    return place if place[0] < place[1] else None


def _place_of_tokens(
    ids: Sequence[int], haystack: bytes, token_ids: Sequence[int], position: int
) -> tuple[int, int] | None:
    """Return the tokens of a text from ``position`` on; its first and last may be others, merged with what is beside.

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
