"""Requests that go on where an earlier one ended, and how the tree ranks what only they can use."""

from __future__ import annotations

import pytest

from ragcache_core.policy import MixturePolicy
from ragcache_core.tree import KnowledgeTree, PathSegment, check_invariants
from ragcache_core.types import Tier
from tests.unit.tree.scene import chain, units_in


class Chat:
    """Requests to a tree, whose words are units of one token: documents in capitals, all else in small letters."""

    def __init__(self) -> None:
        self.tree = KnowledgeTree(MixturePolicy())

    def ask(self, prompt: str, answer: str = "", tool: str | None = None) -> int:
        """Serve a prompt, and return which turn it was; all of it lies on the GPU then."""
        tree, words = self.tree, prompt.split()
        keys, segments, first = chain(*words, *answer.split()), [], 0
        for i, word in enumerate([*words, ""], 1):
            if word.isupper() or not word:
                if i - 1 > first:
                    segments.append(PathSegment(keys[first : i - 1], i - 1 - first))
                if word:
                    segments.append(PathSegment(keys[i - 1 : i], 1, word))
                first = i
        turn = tree.conversations.on_access(keys[: len(words)], tree.num_requests)
        tree.record_access(tree.insert(segments), num_hit_units=0, cost_per_token_s=1e-3, turn=turn)
        if answer:
            tree.extend(keys[len(words) - 1], keys[len(words) :], len(answer.split()))
            tree.record_answer(keys[len(words)], turn, tool)
        for key in keys:
            at = tree.locate(key)
            assert at is not None
            tree.add(at.node, 1 << at.unit, Tier.GPU)
        check_invariants(tree)
        return turn

    def turn_at(self, words: str) -> int:
        """Return whose turn's the unit is that ``words`` end with."""
        at = self.tree.locate(chain(*words.split())[-1])
        assert at is not None
        return at.node.turn

    def kind_at(self, words: str) -> int:
        """Return by which kind of turns the unit ranks that ``words`` end with."""
        at = self.tree.locate(chain(*words.split())[-1])
        assert at is not None
        return at.node.turn_kind


def test_a_prompt_with_a_whole_prompt_and_its_answer_before_it_is_the_next_turn() -> None:
    chat = Chat()
    assert chat.ask("sys A q1", "a1 b1") == 1
    assert chat.ask("sys A q1 a1 b1 q2", "a2") == 2
    assert chat.ask("sys A q1 a1 b1 q2 a2 B q3", "a3") == 3


@pytest.mark.parametrize(
    "prompt",
    ["sys A q1", "sys A q1 other", "sys A q2", "sys B q1 a1", "q1 a1 b1 q2"],
    ids=["again", "edited", "another question", "another document", "a shorter history"],
)
def test_a_prompt_with_only_a_common_beginning_is_no_turn(prompt: str) -> None:
    chat = Chat()
    chat.ask("sys A q1", "a1 b1")
    assert chat.ask(prompt) == 1
    assert chat.tree.returning.probability(1) == 0.0


def test_the_history_is_the_conversations_and_so_are_documents_that_it_alone_uses() -> None:
    chat = Chat()
    chat.ask("sys A p1", "b1")
    chat.ask("sys C q1", "a1")
    assert [chat.turn_at(words) for words in ("sys C", "sys C q1", "sys C q1 a1")] == [0, 1, 1], "others may ask for C"
    chat.ask("sys C q1 a1 B q2", "a2")
    for words in ("sys C", "sys C q1", "sys C q1 a1", "sys C q1 a1 B", "sys C q1 a1 B q2", "sys C q1 a1 B q2 a2"):
        assert chat.turn_at(words) == 2, words
    chat.ask("sys C r1", "c1")
    chat.ask("sys C r2")
    assert [chat.turn_at(words) for words in ("sys C", "sys C q1", "sys C r1")] == [0, 2, 1]
    chat.ask("sys C q1 a1 B q2 a2 q3", "a3")
    assert [chat.turn_at(words) for words in ("sys", "sys C", "sys C q1")] == [0, 0, 3], "two others have used C"


def test_a_turn_that_was_not_recognised_does_not_end_the_conversation() -> None:
    chat = Chat()
    for number in range(9):
        chat.ask(f"sys O{number} o", "a")
    chat.ask("sys A q1")  # its answer is too short to fill a unit
    chat.ask("sys A q1 q2", "a2")
    assert chat.ask("sys A q1 q2 a2 q3", "a3") == 2
    assert [chat.turn_at(words) for words in ("sys", "sys A", "sys A q1", "sys A q1 q2 a2 q3")] == [0, 2, 2, 2]


def test_documents_and_answers_of_a_conversation_that_ended_do_not_outlive_later_ones() -> None:
    """Each turn uses a first turn's document again, and an answer is used by no request before the next turn."""
    chat = Chat()
    for i in range(60):
        said = f"sys D{i} q{i}"
        for k in range(5):
            chat.ask(said, f"a{i}.{k}")
            said += f" a{i}.{k} r{i}.{k}"
    chat.tree.evict(Tier.GPU, chat.tree.tiers[Tier.GPU].num_units - 46)
    left = {key[-1] for node in chat.tree.nodes() if chat.tree.resident_mask(node, Tier.GPU) for key in node.keys}
    assert {f"D{i}" for i in range(56, 60)} <= left
    assert not {f"D{i}" for i in range(54)} & left
    assert {"a59.3", "a59.4", "a58.4"} <= left


def test_what_ends_a_single_turn_goes_before_documents_and_what_may_return_stays() -> None:
    single, chatty = Chat(), Chat()
    for i in range(30):
        single.ask(f"S{i} q{i}", f"a{i}")
        chatty.ask(f"S{i} q{i}", f"a{i}")
        chatty.ask(f"S{i} q{i} a{i} r{i}", f"b{i}")
        chatty.ask(f"S{i} q{i} a{i} r{i} b{i} s{i}", f"c{i}")
    evicted = [unit.node.doc_id for unit in units_in(single.tree.evict(Tier.GPU, 30))]
    assert evicted == [None] * 30
    single.tree.evict(Tier.GPU, 30)
    assert single.tree.tiers[Tier.GPU].num_units == 30, "every question and answer is gone, and no document"
    oldest = [unit.node.turn for unit in units_in(chatty.tree.evict(Tier.GPU, 30))]
    assert set(oldest) == {3}, "the conversations that began first"
    assert chatty.tree.locate(chain("S29", "q29", "a29")[-1]) is not None


def test_conversations_with_more_turns_outlive_equally_old_ones() -> None:
    chat = Chat()
    for i in range(100):  # one in five goes on, and then for long
        chat.ask(f"q{i}", f"a{i}")
        if i % 5 == 0:
            said = f"q{i} a{i}"
            for k in range(6):
                chat.ask(f"{said} q{i}.{k}", f"a{i}.{k}")
                said += f" q{i}.{k} a{i}.{k}"
    chat.ask("long1", "a1")
    chat.ask("long1 a1 long2", "a2")
    chat.ask("short1", "b1")
    chat.tree.evict(Tier.GPU, chat.tree.tiers[Tier.GPU].num_units - 4)
    left = {key for node in chat.tree.nodes() if chat.tree.resident_mask(node, Tier.GPU) for key in node.keys}
    assert ("long1", "a1", "long2") in left
    assert ("short1",) not in left


@pytest.mark.parametrize("is_late", [False, True], ids=["with the answer", "after it"])
def test_what_waits_for_a_slow_tool_goes_before_what_waits_for_a_fast_one(is_late: bool) -> None:
    """Documents of a first turn as well; a name may come when the answer has ended."""
    chat = Chat()
    backs: dict[int, str] = {}
    for i in range(60):
        if i in backs:
            chat.ask(f"{backs.pop(i)} r{i}")
        tool, number = ("slow", 24) if i % 2 else ("fast", 2)
        chat.ask(f"S{i} q{i}", f"a{i}", None if is_late else tool)
        if is_late:
            chat.tree.record_answer(chain(f"S{i}", f"q{i}", f"a{i}")[-1], 1, tool)
        backs[i + number] = f"S{i} q{i} a{i}"
    chat.ask("FAST of", "af", "fast")
    chat.ask("SLOW os", "as", "slow")
    chat.tree.evict(Tier.GPU, chat.tree.tiers[Tier.GPU].num_units - 3)
    left = {key for node in chat.tree.nodes() if chat.tree.resident_mask(node, Tier.GPU) for key in node.keys}
    assert left == {*chain("FAST", "of", "af")}


def test_a_conversation_waits_for_its_latest_tool_alone() -> None:
    chat = Chat()
    chat.ask("A q1", "a1", "search")
    assert [chat.kind_at(words) for words in ("A", "A q1", "A q1 a1")] == [chat.tree.returning.kind_of(1, "search")] * 3
    chat.ask("A q1 a1 q2", "a2")
    without = chat.tree.returning.kind_of(2)
    assert [chat.kind_at(words) for words in ("A", "A q1 a1", "A q1 a1 q2", "A q1 a1 q2 a2")] == [without] * 4
    chat.ask("A q1 a1 q2 a2 q3")
    assert chat.kind_at("A q1 a1 q2 a2") == 3, "until its answer it may call any"
