"""A mapping with a bound for each tenant: no tenant evicts another's entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class TenantEntries(Generic[_Key, _Value]):
    """Keeps the newest entries of each tenant. Equal keys of different tenants are different entries.

    Args:
        limit: entries of requests without a tenant.
        tenant_limit: entries of each tenant; ``limit`` where it is not given.
    """

    def __init__(self, limit: int, tenant_limit: int | None = None) -> None:
        self._limit = limit
        self._tenant_limit = limit if tenant_limit is None else tenant_limit
        self._by_tenant: dict[str | None, OrderedDict[_Key, _Value]] = {}

    def __bool__(self) -> bool:
        return any(self._by_tenant.values())

    def get(self, tenant: str | None, key: _Key) -> _Value | None:
        """Return a tenant's entry, or None."""
        entries = self._by_tenant.get(tenant)
        return None if entries is None else entries.get(key)

    def find(self, key: _Key) -> _Value | None:
        """Return the entry of a key of any tenant."""
        return next((entries[key] for entries in self._by_tenant.values() if key in entries), None)

    def put(self, tenant: str | None, key: _Key, value: _Value) -> list[_Value]:
        """Set a tenant's entry, as its newest if it is new, and return the evicted ones."""
        entries = self._by_tenant.setdefault(tenant, OrderedDict())
        entries[key] = value
        limit = self._limit if tenant is None else self._tenant_limit
        return [entries.popitem(last=False)[1] for _ in range(len(entries) - limit)]

    def pop(self, tenant: str | None, key: _Key) -> _Value | None:
        """Remove and return a tenant's entry, or None."""
        entries = self._by_tenant.get(tenant)
        return None if entries is None else entries.pop(key, None)

    def values(self) -> Iterator[_Value]:
        """Yield the values of all tenants."""
        return (value for entries in self._by_tenant.values() for value in entries.values())
