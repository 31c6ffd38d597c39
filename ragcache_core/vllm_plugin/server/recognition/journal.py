"""The journal of registrations beside the disk tier: a private file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from ragcache_core.log import logger_of
from ragcache_core.private_files import make_private_folder, open_private, replacing
from ragcache_core.recognition.files import (
    StoredRegistrations,
    forgotten_record,
    journal_head,
    read_journal,
    registered_record,
    restricted_record,
)

logger = logger_of(__name__)

Change = tuple[str | None, str, bytes | None]
"""Tenant, document and registration; without a registration its end."""


class RegistrationJournal:
    """Appends changes of registrations to a file. Blocking; one call at a time.

    A file that cannot be written is warned about once, and the server goes on without it.

    Attributes:
        is_broken: the file lacks changes until it is rewritten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_broken = False
        self._num_records = 0

    def load(self) -> StoredRegistrations | None:
        """Return the file's content; ``None`` without a file.

        Raises:
            ValueError: it is damaged, or cannot be read. A damaged file has another name besides, by which it is kept
                when it is rewritten.
        """
        try:
            stored = read_journal(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{self._path} cannot be read: {error}") from error
        except ValueError as error:
            kept = self._path.with_suffix(".damaged")
            with suppress(OSError):
                kept.unlink(missing_ok=True)
                kept.hardlink_to(self._path)  # if nothing can be written now, the next start must find the damage
            raise ValueError(f"{error}; {kept} has it") from error
        self._num_records = stored.num_records
        return stored

    def load_restricted(self) -> set[str | None]:
        """Return the restricted tenants in the folder's other files (of other tokenizers).

        Raises:
            ValueError: one is damaged, or cannot be read.
        """
        restricted: set[str | None] = set()
        for path in sorted(self._path.parent.glob("registrations-*.journal")):
            if path != self._path:
                try:
                    restricted |= read_journal(path.read_bytes()).restricted
                except (OSError, ValueError) as error:
                    raise ValueError(f"{path}: {error}") from error
        return restricted

    def rewrite(
        self, points: tuple[int, int], restricted: Collection[str | None], entries: Iterable[tuple[str | None, bytes]]
    ) -> None:
        """Replace the file by one with only these registrations."""
        records = [restricted_record(restricted)] if restricted else []
        records += [registered_record(tenant, data) for tenant, data in entries]
        try:
            make_private_folder(self._path.parent)
            with replacing(self._path) as file:
                file.write(journal_head(points) + b"".join(records))
        except OSError as error:
            self._break(error)
        else:
            self._num_records, self.is_broken = len(records), False

    def append(self, changes: Iterable[Change], restricted: Collection[str | None] = ()) -> None:
        """Append changes, and newly restricted tenants; durable at the return."""
        if self.is_broken:
            return
        records = [restricted_record(restricted)] if restricted else []
        records += [
            forgotten_record(tenant, doc_id) if data is None else registered_record(tenant, data)
            for tenant, doc_id, data in changes
        ]
        try:
            with open(self._path, "ab", opener=open_private) as file:
                file.write(b"".join(records))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._break(error)
        else:
            self._num_records += len(records)

    def has_surplus(self, num_documents: int) -> bool:
        """Return whether most records of the file are obsolete."""
        return self._num_records > 2 * num_documents + 1000

    def _break(self, error: OSError) -> None:
        if not self.is_broken:
            logger.warning(
                "RC-REGISTRATIONS-NOT-KEPT: registered documents are lost at the next restart, %s: %s",
                self._path,
                error,
            )
        self.is_broken = True
