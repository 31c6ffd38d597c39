"""Texts become chunks at their own seams: sections, paragraphs, sentences, words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ragcache_core.errors import ConfigError

_HEADING = re.compile(r" {0,3}#{1,6}([ \t]|$)")
_WINDOW_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class Splitting:
    """How long a chunk may be, in characters.

    A chunk takes as much as fits into ``max_chars``; with ``min_chars`` it ends at the best seam after that many.
    ``overlap_chars`` of a chunk are repeated at most in the next one.

    Raises:
        ConfigError: not ``0 <= overlap_chars < min_chars <= max_chars``.
    """

    max_chars: int = 1600
    min_chars: int | None = None
    overlap_chars: int = 0

    def __post_init__(self) -> None:
        least = self.max_chars if self.min_chars is None else self.min_chars
        if not 0 <= self.overlap_chars < least <= self.max_chars:
            raise ConfigError(
                f"chunks of {least} to {self.max_chars} characters that overlap by {self.overlap_chars} cannot be "
                "cut: 0 <= overlap < smallest <= largest"
            )

    def split(self, text: str, *, is_markdown: bool = False) -> list[str]:
        """Return the chunks of ``text``, without white space around them. No chunk is longer than ``max_chars``.

        A text that fits is one chunk; a text of white space has none. A Markdown heading shorter than half a chunk
        is never alone: the beginning of its section is with it.
        """
        if len(stripped := text.strip()) <= self.max_chars:
            return [stripped] if stripped else []
        spans = self._spans(text, self.max_chars, is_markdown)
        return [text[start:end] for start, end in (self._join_headings(text, spans) if is_markdown else spans)]

    def _spans(self, text: str, max_chars: int, is_markdown: bool) -> list[tuple[int, int]]:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

        least = max_chars if self.min_chars is None else min(self.min_chars, max_chars)
        overlap = min(self.overlap_chars, least - 1)
        splitter = (MarkdownSplitter if is_markdown else TextSplitter)((least, max_chars), overlap)
        # It takes time quadratic in the length of a text without seams: it sees a window at a time, and the last chunk
        # of a window is cut again, at the beginning of the next.
        window = max(_WINDOW_CHARS, 8 * max_chars)
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
        """A section longer than a chunk loses its heading to a chunk of its own: give it back.

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
        room = self.max_chars - (start - heading[0])
        if start < heading[1] or room <= self.max_chars // 2:
            return [heading, (start, end)]
        if end - start <= room:
            return [(heading[0], end)]
        cut = start + self._spans(text[start:end], room, is_markdown=False)[0][1]
        rest = self._spans(text[cut:end], self.max_chars, is_markdown=False)
        return [(heading[0], cut), *((cut + a, cut + b) for a, b in rest)]


def _is_heading(text: str, start: int, end: int) -> bool:
    return all(_HEADING.match(line) or not line.strip() for line in text[start:end].splitlines())
