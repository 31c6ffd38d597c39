"""The example of replicas on Ray Serve, without Ray: what it leaves alone, and what it refuses."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from examples import fleet_ray as example

OPTIONS = {"model": "org/model", "replicas": 2, "port": 8000}


@pytest.mark.parametrize("address", ["auto", None])
def test_on_a_ray_of_others_it_replaces_and_deletes_no_application_of_theirs(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, object, object]] = []
    serve = SimpleNamespace(
        start=lambda **_: None,
        run=lambda _, name, route_prefix: done.append(("run", name, route_prefix)),
        delete=lambda name: done.append(("delete", name, None)),
        shutdown=lambda: done.append(("shutdown", None, None)),
    )
    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(init=lambda *_, **__: None, shutdown=lambda: None, serve=serve)
    )
    monkeypatch.setattr(example, "ragcache_deployment", lambda *_, **__: None)
    monkeypatch.setattr(example, "Engine", SimpleNamespace(connect=lambda url, api_key: nullcontext(url)))
    with example.served(argparse.Namespace(**OPTIONS, address=address)) as url:
        pass
    (_, name, route), ended = done
    assert str(url) == f"http://127.0.0.1:8000{route}"
    assert name != "ragcache"
    if address is None:
        assert (route, ended[0]) == ("/", "shutdown")
    else:
        assert (route, ended[:2]) == (f"/{name}", ("delete", name))
