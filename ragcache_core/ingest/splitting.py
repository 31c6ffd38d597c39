"""Split texts at natural boundaries: sections, paragraphs, sentences, words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ragcache_core.errors import ConfigError

_HEADING = re.compile(r" {0,3}#{1,6}([ \t]|$)")
_WINDOW_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class Splitting:
    """Maximum length of a text chunk, in characters or in the unit of ``length``, such as tokens.

    A chunk takes as much as fits into ``max_length``; with ``min_length`` it ends at the best seam after that much.
    ``overlap`` of a chunk is repeated at most in the next one.

    Raises:
        ConfigError: not ``0 <= overlap < min_length <= max_length``.
    """

    max_length: int = 1600
    min_length: int | None = None
    overlap: int = 0
    length: Callable[[str], int] = len

    def __post_init__(self) -> None:
        least = self.max_length if self.min_length is None else self.min_length
        if not 0 <= self.overlap < least <= self.max_length:
            raise ConfigError(
                f"chunks of {least} to {self.max_length} that overlap by {self.overlap} cannot be cut: "
                "0 <= overlap < smallest <= largest"
            )

    def split(self, text: str, *, is_markdown: bool = False) -> list[str]:
        """Return the stripped text chunks of ``text``, each of at most ``max_length``.

        A text that fits is one chunk; a text of white space has none. A Markdown heading shorter than half a chunk
        is never alone: the beginning of its section is with it.
        """
        if self._fits(stripped := text.strip()):
            return [stripped] if stripped else []
        spans = self._spans(text, self.max_length, is_markdown)
        return [text[start:end] for start, end in (self._join_headings(text, spans) if is_markdown else spans)]

    def _spans(self, text: str, max_length: int, is_markdown: bool) -> list[tuple[int, int]]:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

        least = max_length if self.min_length is None else min(self.min_length, max_length)
        size, overlap = (least, max_length), min(self.overlap, least - 1)
        kind = MarkdownSplitter if is_markdown else TextSplitter
        splitter = kind(size, overlap) if self.length is len else kind.from_callback(self.length, size, overlap)
        # It takes time quadratic in the length of a text without seams: it sees a window at a time, and the last chunk
        # of a window is cut again, at the beginning of the next.
        window = max(_WINDOW_CHARS, 8 * max_length)
        spans: list[tuple[int, int]] = []
        begin, is_last = 0, False
        while not is_last:
            is_last = begin + window >= len(text)
            chunks = [(begin + at, chunk) for at, chunk in splitter.chunk_indices(text[begin : begin + window])]
            begin = chunks.pop()[0] if len(chunks) > 1 and not is_last else begin + window
            # Its chunks may begin with the space of a line, which it does not count, or be white space to Python alone.
            spans += [
                (start + len(chunk) - len(chunk.lstrip()), start + len(chunk.rstrip()))
                for start, chunk in chunks
                if chunk.strip()
            ]
        return spans

    def _join_headings(self, text: str, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Rejoin a heading with its section, from which it is split if the section is longer than a chunk.

        ::

            | # Zor |     | Zor is a long story ... |      the splitter's
            | # Zor \\n\\n Zor is a | | long story ... |   ours
        """
        heading: tuple[int, int] | None = None
        for start, end in spans:
            pieces = self._after_heading(text, heading, start, end) if heading else [(start, end)]
            heading = pieces.pop() if _is_heading(text, *pieces[-1]) else None
            yield from pieces
        if heading is not None:
            yield heading

    def _after_heading(self, text: str, heading: tuple[int, int], start: int, end: int) -> list[tuple[int, int]]:
        room = self.max_length - self.length(text[heading[0] : start])
        if start < heading[1] or room <= self.max_length // 2:
            return [heading, (start, end)]
        if self._fits(text[heading[0] : end]):
            return [(heading[0], end)]
        cut = start + self._spans(text[start:end], room, is_markdown=False)[0][1]
        if not self._fits(text[heading[0] : cut]):  # two texts may have fewer tokens than both in one
            return [heading, (start, end)]
        rest = self._spans(text[cut:end], self.max_length, is_markdown=False)
        return [(heading[0], cut), *((cut + a, cut + b) for a, b in rest)]

    def _fits(self, chunk: str) -> bool:
        return self.length(chunk) <= self.max_length


def _is_heading(text: str, start: int, end: int) -> bool:
    return all(_HEADING.match(line) or not line.strip() for line in text[start:end].splitlines())
