"""What a tenant's salt keeps from everybody else who holds the server's key: which documents were shown with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.vllm_plugin.scheduler_scene import Stage

SECRET = "contract-of-tenant-a"


def named(doc_id: str) -> dict[str, object]:
    return {"documents": [{"id": doc_id, "start": 0, "end": 160}]}


@pytest.mark.parametrize("is_speculative", [False, True])
def test_an_engine_tells_no_ids_of_documents_that_were_shown_with_a_salt(
    monkeypatch: pytest.MonkeyPatch, is_speculative: bool
) -> None:
    """All that the server's routes and series show arrives with the statistics of steps."""
    stage = Stage(settings={"max_prefill_bs": 4})
    told: list[Any] = []
    connector = stage.scheduler.connector
    take = connector.get_kv_connector_stats
    monkeypatch.setattr(connector, "get_kv_connector_stats", lambda: told.append(stats := take()) or stats)
    for turn in range(3):
        guess = f"guess-{turn}" if is_speculative else None
        stage.ask("A", salt="salt-of-tenant-a", metadata=named(SECRET), speculation=guess)
        stage.ask("B", metadata=named("handbook"))
        stage.finish_all()
        if guess is not None:
            stage.scheduler.confirm(guess)
    text = json.dumps([stage.controller.report(), *(stats.data for stats in told if stats is not None)])
    assert stage.uses == {"handbook": 3}
    assert stage.controller.counters.num_requests == 6, "the figures count them all"
    assert text.count("handbook") > 1, "in a report and among the cached paths"
    assert SECRET not in text
    assert "salt-of-tenant-a" not in text
