"""What chunk reuse relies on inside vLLM: names of ``ragcache_core/vllm_plugin/compat.py`` and ``chunks/``."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def facts(all_facts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = all_facts["chunks"]
    return found


def test_a_connector_is_called_as_ours_answers(facts: dict[str, Any]) -> None:
    assert facts["connector"] == {
        "bind_connector_metadata": ["self", "connector_metadata"],
        "handle_preemptions": ["self", "kv_connector_metadata"],
        "get_finished": ["self", "finished_req_ids"],
        "build_connector_worker_meta": ["self"],
        "get_handshake_metadata": ["self"],
        "set_xfer_handshake_metadata_pp_aware": ["self", "metadata"],
        "update_connector_output": ["self", "connector_output"],
        "reset_cache": ["self"],
    }, "follow the change in chunks/connector.py"
    assert facts["aggregate"] == ["self", "other"], "ChunkWorkerMetadata joins the workers' answers with it"
    assert facts["sync_first"], "start_load_kv() runs after the forward pass of a step without synchronous loads"
    assert facts["steps"], "captures are armed when metadata is bound, slices run after the pass, then chunks are kept"
    assert facts["steps_v2"], "the same for vLLM's second model runner"


def test_scattered_tokens_are_described_as_backends_expect(facts: dict[str, Any]) -> None:
    ours = {"query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len"}
    ours |= {"max_seq_len", "block_table_tensor", "slot_mapping", "causal", "positions", "seq_lens_cpu_upper_bound"}
    assert ours | {"is_prefilling"} <= set(facts["common"]), "PartialPrefill fills them in"
    assert facts["group"] == ["backend", "layer_names", "kv_cache_spec"], "PartialPrefill builds metadata from them"
    assert facts["builder"] == [
        ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"],
        ["self", "common_prefix_len", "common_attn_metadata", "fast_build"],
    ], "PartialPrefill has builders of its own"
    assert facts["unplanned"], "fast_build: FlashAttention's schedule has room for as many sequences as requests run"
    assert facts["reordered"], "PartialPrefill sets it to 0: runs of one token stay where they are in a batch"
    assert facts["set_forward_context"] == [True] * 3, "compat.in_forward() runs the model with them"
    assert facts["forward_context"] == [True] * 3, (
        "metadata is replaced where rows leave, slots say where requests begin"
    )


def test_the_worker_has_the_model_and_its_attention(facts: dict[str, Any]) -> None:
    assert facts["worker"] == ["self", "kv_cache_config"], "RAGCacheWorker attaches the model after it"
    assert facts["runners"] == [True, True], "chunks/build.py reads get_model() and attn_groups of both runners"
    assert facts["attention"] == [True] * 7, (
        "attention_layers.py, model/paged_kv.py and compute/scattered_attention.py read them"
    )
    assert facts["refused_attention"] == [True] * 10, (
        "attention_layers.py refuses what has one of these, and attention_mass.py weighs by the last two of a backend: "
        "under another name they would count as absent, and chunks come out wrong"
    )
    assert facts["write"] == ["self", "layer", "key", "value", "kv_cache", "slot_mapping"], "see KVAccess.write()"
    assert facts["forward"] == ["self", "layer", "query"], "Observed wraps it"
    assert facts["rope"] == [True] * 4, "Rope reads them"
    assert facts["refused"] == [], "these refused RoPEs have other names now: see rope.py"
    assert facts["all_reduce"] == ["input_"], "compat.sum_over_workers() calls it"


def test_approximate_blocks_can_be_kept_apart(facts: dict[str, Any]) -> None:
    assert facts["request"] == [True] * 5, "chunks/connector.py reads them"
    assert facts["skips"], "a request that wants all logits is prefilled"
    assert facts["hashes_grow"], "blocks of an answer chain off the private hashes"
    assert facts["delayed"], "blocks are named when they are there, which is after _keep_apart()"
    assert facts["loaded"], "an update_connector_output() that does not see finished_recving leaves jobs running"
    assert facts["allocated"] == ["self", "allow_none"], "ChunkReuse computes into the blocks that a request got"
    assert facts["waits"], "an aborted request keeps its blocks until its job is reported as finished"


def test_a_step_reports_what_it_computes(facts: dict[str, Any]) -> None:
    assert facts["output"] == [True, True], "ChunkReuse.build_connector_meta() reads them"
    assert facts["block_state"] == ["req_ids", "resolve_block_ids"], "captures need the blocks of running requests"
    assert facts["prefill_stats"] == [
        *("self", "num_prompt_tokens", "num_local_cached_tokens", "num_external_cached_tokens"),
    ], "tokens that a job computes are not cached ones"
