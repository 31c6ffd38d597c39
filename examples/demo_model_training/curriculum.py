"""The stages of training: one short document first, crowds of long ones last."""

from dataclasses import dataclass, replace
from typing import Final

from examples.demo_model_training.language import WritingStyle


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the curriculum. Pairs are inclusive ranges, shares are probabilities."""

    num_entities: tuple[int, int]
    num_facts: tuple[int, int]
    num_questions: int
    style: WritingStyle
    same_kind_share: float = 0.65
    same_kind_entities: tuple[int, ...] = (2,)
    same_kind_facts: tuple[int, int] = (1, 3)
    two_hop_share: float = 0.0
    three_hop_share: float = 0.0
    continued_two_hop_share: float = 0.0
    reverse_share: float = 0.14
    yes_no_share: float = 0.12
    absent_share: float = 0.0
    gap_share: float = 0.0
    """Share of rows with random position gaps between documents."""
    drill_share: float = 0.0
    """Share of rows that only ask backwards, over few facts."""
    crowd_share: float = 0.0
    """Share of rows with as many as `crowd_entities` entities."""
    crowd_entities: tuple[int, int] = (8, 16)
    chain_share: float = 0.0
    """Share of rows whose first three entities lead to one another; `chain_entities` are there in all."""
    chain_entities: tuple[int, int] = (3, 5)


CURRICULUM: Final = (
    Stage((1, 1), (2, 3), 5, WritingStyle(0.2, filler_share=0.0)),
    Stage((1, 2), (2, 4), 6, WritingStyle(0.4, filler_share=0.1), two_hop_share=0.25),
    Stage(
        (1, 3),
        (2, 5),
        8,
        WritingStyle(0.5, split_share=0.15),
        same_kind_entities=(2, 2, 3),
        same_kind_facts=(1, 4),
        two_hop_share=0.3,
        absent_share=0.04,
        drill_share=0.1,
    ),
    Stage(
        (1, 5),
        (2, 6),
        10,
        WritingStyle(0.5, split_share=0.2),
        same_kind_share=0.6,
        same_kind_entities=(2, 2, 3, 3, 4, 5),
        same_kind_facts=(1, 6),
        two_hop_share=0.3,
        absent_share=0.05,
        drill_share=0.1,
        gap_share=0.4,
    ),
    Stage(
        (1, 5),
        (2, 6),
        10,
        WritingStyle(0.5, split_share=0.2),
        same_kind_share=0.55,
        same_kind_entities=(2, 2, 3, 3, 4, 5),
        same_kind_facts=(1, 6),
        two_hop_share=0.3,
        absent_share=0.05,
        drill_share=0.1,
        gap_share=0.4,
        crowd_share=0.15,
    ),
)
"""The last stage, with crowds of documents, is entered by time; the others by accuracy."""


def _deep(stage: Stage, max_pieces: int = 3) -> Stage:
    """Return the stage with chains of three entities and entries that are cut into up to `max_pieces` documents."""
    return replace(
        stage,
        style=replace(stage.style, split_share=0.45, max_pieces=max_pieces),
        two_hop_share=0.2,
        three_hop_share=0.15,
        continued_two_hop_share=0.1,
        reverse_share=0.06,
        yes_no_share=0.06,
        drill_share=0.05,
        chain_share=0.4,
    )


DEEP_CURRICULUM: Final = (*CURRICULUM[:2], _deep(CURRICULUM[2], max_pieces=2), *map(_deep, CURRICULUM[3:]))
"""Questions over two and three documents, and entries whose pronouns cross the border of their documents."""

CURRICULA: Final = {"demo": CURRICULUM, "deep": DEEP_CURRICULUM}
