"""Stores that engines share, as servers of a test: a Redis, and a bucket of S3 by moto."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import httpx
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ragcache_core.client.launch.process import free_port
from tests.support.waiting import until

S3_ENV = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class RedisServer:
    """A running ``redis-server`` of the test's own."""

    def __init__(self, *settings: str) -> None:
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            pytest.skip("no redis-server: apt install redis-server")
        self.port = free_port("127.0.0.1")
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = tempfile.TemporaryDirectory()
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder.name]
        self.process = subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL)
        assert until(self._answers, 20.0)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))  # a wrong password is no reason to try again

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()

    def _answers(self) -> bool:
        try:
            self.client().ping()
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
        return True


@contextmanager
def redis_server(*settings: str) -> Iterator[RedisServer]:
    server = RedisServer(*settings)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def s3_server(bucket: str = "kv-bucket") -> Iterator[str]:
    """Yield the endpoint of a server of S3 that has a bucket."""
    if find_spec("moto") is None or find_spec("flask") is None:
        pytest.skip("no server of S3: pip install 'moto[server]'")
    port = free_port("127.0.0.1")
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, Signature=0"}

    def is_made() -> bool:
        try:
            return httpx.put(f"{endpoint}/{bucket}", headers=signed, timeout=5).status_code < 300
        except httpx.HTTPError:
            return False

    try:
        assert until(is_made, 60.0)
        yield endpoint
    finally:
        process.kill()
        process.wait()
