from __future__ import annotations

import pytest

from ragcache_core.vllm_plugin.api_server import keep_freed_memory


def test_freed_memory_is_kept_for_the_next_step() -> None:
    environ = {"PATH": "/bin"}
    keep_freed_memory(environ)
    assert environ == {
        "PATH": "/bin",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
    }


@pytest.mark.parametrize(
    "tuned", [{"MALLOC_ARENA_MAX": "2"}, {"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}]
)
def test_whoever_tunes_malloc_himself_keeps_his_settings(tuned: dict[str, str]) -> None:
    environ = dict(tuned)
    keep_freed_memory(environ)
    assert environ == tuned


def test_other_settings_of_glibc_do_not_count() -> None:
    environ = {"GLIBC_TUNABLES": "glibc.rtld.nns=8"}
    keep_freed_memory(environ)
    assert "MALLOC_TRIM_THRESHOLD_" in environ
