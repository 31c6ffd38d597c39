"""Copies between the engine and its tiers, whatever happens to requests: what is read and stored is always right."""

from __future__ import annotations

import errno
import logging
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from vllm.v1.request import RequestStatus

from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.vllm_plugin.disk import manager as disk
from ragcache_core.vllm_plugin.offload.layer_load_scheduler import LayerLoads
from ragcache_core.wire import encode_kv_transfer_params
from tests.engine.vllm_plugin.storing_scene import FULL, LATENT, STATE, WINDOW, Steps, host_scheduler, request, tokens
from tests.support.waiting import until

_GROUPS = ((FULL,), (LATENT,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE))
_DOCUMENTS = {name: tokens(i, 20 + 11 * i) for i, name in enumerate("ABCDEF")}
_names = st.lists(st.sampled_from(list(_DOCUMENTS)), min_size=1, max_size=3, unique=True)


class Copies(RuleBasedStateMachine):
    """An engine's scheduler over small tiers; :class:`Steps` checks each block that a step reads or a tier stores.

    A copy from host memory cannot fail without the process, so a failed load is a failed read of the disk.
    """

    @initialize(
        groups=st.sampled_from(_GROUPS),
        is_async=st.booleans(),
        store_steps=st.integers(1, 4),
        host_bytes=st.sampled_from(["96KiB", "1MiB"]),
        by_layer=st.booleans(),
        has_disk=st.sampled_from([True, True, False]),
    )
    def start(
        self, groups: Any, is_async: bool, store_steps: int, host_bytes: str, by_layer: bool, has_disk: bool
    ) -> None:
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        self.stack = ExitStack()
        if by_layer:
            self.stack.enter_context(
                mock.patch.object(LayerLoads, "_is_better", side_effect=lambda *_: len(self.asked) % 2 == 0)
            )
        self.asked: list[Any] = []
        self.num_failing_reads = 0
        tiers: dict[str, Any] = {"groups": groups, "layerwise_loads": by_layer}
        if has_disk:
            folder = self.stack.enter_context(TemporaryDirectory(prefix="ragcache-test-"))
            tiers |= {"disk_bytes": "256KiB", "directory": Path(folder)}
            self.stack.enter_context(mock.patch.object(disk, "kv_identity", return_value={"model": "demo"}))
            read = SlotFile.read
            self.stack.enter_context(
                mock.patch.object(SlotFile, "read", lambda file, *args: self.read_or_fail(read, file, *args))
            )
        self.has_disk = has_disk
        self.make = partial(host_scheduler, 30 * len(groups), host_bytes, is_async=is_async, **tiers)
        self.make_steps = partial(Steps, is_async=is_async, store_steps=store_steps)
        self.open()

    def open(self) -> None:
        self.engine = ExitStack()
        self.scheduler = self.engine.enter_context(self.make())
        self.steps = self.make_steps(self.scheduler)

    @precondition(lambda self: self.has_disk)
    @rule(count=st.integers(1, 20))
    def fail_reads(self, count: int) -> None:
        """Let the next reads of the disk fail; what they were to load is computed."""
        self.num_failing_reads += count

    @precondition(lambda self: self.has_disk)
    @rule(names=_names, are_lost=st.booleans(), num_failing_reads=st.integers(0, 3))
    def restart(self, names: list[str], are_lost: bool, num_failing_reads: int) -> None:
        """Start another engine over the same disk, and ask it what the last one was asked, or has given up."""
        self.ask(names, 1, {})
        if are_lost:
            self.run(4)
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.close()
        self.open()
        self.num_failing_reads = num_failing_reads
        self.ask(names, 1, {})

    @rule(
        names=_names,
        num_answers=st.integers(1, 40),
        limits=st.dictionaries(
            st.sampled_from(["max_offload_tokens", "max_load_tokens"]), st.integers(0, 120), max_size=1
        ),
    )
    def ask(self, names: list[str], num_answers: int, limits: dict[str, int]) -> None:
        words, segments = [], []
        for name in names:
            segments.append(PromptSegment(SegmentKind.DOCUMENT, len(words), len(words) + len(_DOCUMENTS[name]), name))
            words += _DOCUMENTS[name]
        words += tokens(1000 + len(self.asked), 9)
        params = {**encode_kv_transfer_params(segments), **limits}
        self.asked.append(request(f"r{len(self.asked)}", words, num_answers, params=params))
        self.scheduler.add_request(self.asked[-1])

    @rule(count=st.integers(1, 12))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.steps.step()

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @precondition(lambda self: self.scheduler.running and not self.is_loading())
    @rule()
    def preempt_all(self) -> None:
        with suppress(RuntimeError):  # vLLM preempts, and frees their blocks when the steps in flight have ended
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    @rule()
    def reset_gpu(self) -> None:
        self.scheduler.reset_prefix_cache()

    @rule()
    def reset_tiers(self) -> None:
        self.scheduler.connector.reset_cache()

    @rule()
    def spoil(self) -> None:
        """As where another connector fails to load."""
        self.scheduler.connector.copies.spoil_stores()

    @rule(name=st.sampled_from(list(_DOCUMENTS)))
    def forget(self, name: str) -> None:
        self.scheduler.forget([name])

    @rule(name=st.sampled_from(list(_DOCUMENTS)), action=st.sampled_from(["pin", "unpin"]))
    def pin(self, name: str, action: str) -> None:
        body = {
            "token": f"{action} {self.steps.num} {len(self.asked)}",
            "ids": [name],
            "keeps_answer": False,
            "dry_run": False,
        }
        while not self.scheduler.act_on_cache(action, body):
            pass

    def read_or_fail(self, read: Any, file: SlotFile, *args: Any) -> None:
        if self.num_failing_reads:
            self.num_failing_reads -= 1
            raise OSError(errno.EIO, "as the test wants it")
        read(file, *args)

    def is_loading(self) -> bool:
        waiting = self.scheduler.kv_holding_waiting
        return any(one.status == RequestStatus.WAITING_FOR_REMOTE_KVS for one in waiting)

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        with self.stack:
            self.close()
            ended = [one for one in self.asked if one.status != RequestStatus.FINISHED_ABORTED]
            assert all(one.num_output_tokens == one.max_tokens for one in ended)

    def close(self) -> None:
        with self.engine:
            assert until(lambda: not self.steps.step(), 60.0), "the engine goes on stepping"
            assert not self.scheduler.requests
            assert not self.scheduler.connector.copies.num_requests
            assert not self.scheduler.connector.copies.num_jobs
            host = self.scheduler.connector._host
            assert not any(host._num_reads[row] for row in host.contents().values())
            assert until(lambda: not self.scheduler.left()["num_blocks"], 5.0), "something forgotten is still there"


TestCopies = Copies.TestCase
TestCopies.settings = settings(
    max_examples=10,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
