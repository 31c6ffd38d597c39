"""The readable names that requests carry of documents whose ids are not readable."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from ragcache_core.client import Engine
from ragcache_core.client.prompts.request_plan import DocumentFacts
from ragcache_core.prompt import PromptLayout
from ragcache_core.types import MAX_LABEL_CHARS, Document, PromptSegment, SegmentKind
from ragcache_core.wire import KEY, decode_kv_transfer_params, encode_kv_transfer_params
from ragcache_integrations.langchain.documents import content_id
from tests.support.scripted_server import ScriptedServer

ID = str(UUID(int=7))


@pytest.mark.parametrize(
    ("doc_id", "metadata", "label"),
    [
        (ID, {"source": "guide.pdf"}, "guide.pdf"),
        (ID.replace("-", ""), {"source": "guide.pdf"}, "guide.pdf"),
        (content_id("text"), {"source": "guide.pdf"}, "guide.pdf"),
        (ID, {"file_path": "/notes/mel.txt"}, "/notes/mel.txt"),
        (ID, {"source": " ", "file_path": "mel.txt"}, "mel.txt"),
        (ID, {"source": "x" * 1000 + "end"}, ("x" * 1000 + "end")[-MAX_LABEL_CHARS:]),
        (ID, {"source": "half \ud800"}, "half ?"),
        (ID, {"source": 7}, None),
        (ID, {}, None),
        ("guide.pdf#3", {"source": "guide.pdf"}, None),
    ],
)
def test_a_document_without_a_readable_id_has_its_source_as_label(
    doc_id: str, metadata: dict[str, object], label: str | None
) -> None:
    assert Document(doc_id, "text", metadata).label == label


def test_a_label_goes_from_a_document_that_was_seen_to_the_engine() -> None:
    facts = DocumentFacts()
    facts.add([Document(ID, "text", {"source": "guide.pdf"}), Document("mel.txt", "text", {"source": "mel.txt"})])
    segments = [PromptSegment(SegmentKind.DOCUMENT, 0, 4, ID), PromptSegment(SegmentKind.DOCUMENT, 4, 8, "mel.txt")]
    params: Any = encode_kv_transfer_params(facts.labelled(segments))
    assert [document.get("label") for document in params[KEY]["documents"]] == ["guide.pdf", None]
    assert [segment.label for segment in decode_kv_transfer_params(params, 8).segments] == ["guide.pdf", None]


@pytest.mark.parametrize("label", [7, "", "x" * (MAX_LABEL_CHARS + 1), ["guide.pdf"], "half \ud800"])
def test_what_cannot_be_shown_is_no_label_and_costs_nothing_else(label: object) -> None:
    said = {"version": 1, "documents": [{"id": ID, "start": 0, "end": 4, "label": label}]}
    (segment,) = decode_kv_transfer_params({KEY: said}, 4).segments
    assert (segment.doc_id, segment.label) == (ID, None)


def test_requests_about_documents_without_readable_ids_say_their_labels(demo_model: str) -> None:
    layout = PromptLayout()
    document = Document(str(UUID(int=8)), "The river Mel is long and has many bridges.", {"source": "rivers.pdf"})

    def labels(body: Any) -> list[Any]:
        return [each.get("label") for each in body["kv_transfer_params"][KEY]["documents"]]

    with ScriptedServer(root=demo_model) as server, Engine.connect(server.url) as engine:
        engine.generate(layout.render(engine.tokenizer, [document], "How long?"))
        assert labels(server.requests[-1].body) == ["rivers.pdf"]
        messages = layout.messages([document], "How long?")
        assert labels(engine.integration.prompts.plan_chat(messages, documents=[document]).extra_body) == ["rivers.pdf"]
