"""What a deadline may choose from decides how many are in time, planned without an engine."""

from __future__ import annotations

from examples.deadline import ALL_WAYS, share_in_time
from examples.demo_model_training.recurring import recurring_questions


def test_each_way_that_may_be_chosen_has_more_questions_in_time() -> None:
    questions = [[document.doc_id for document in question.documents] for question in recurring_questions(30)]
    exact, ordered, reused = (share_in_time(0.5, questions, set(ALL_WAYS[:n])) for n in range(3))
    assert 0.0 < exact < ordered < reused < 1.0
