"""A journal that was full takes new sessions as soon as there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

from everroll.sessions.errors import StorageFullError
from everroll.sessions.journal import open_journal
from everroll.sessions.storage import StorageGauge


async def test_room_that_came_back_is_noticed_before_a_session_is_refused(tmp_path: Path) -> None:
    journal = await open_journal(str(tmp_path / "journal.db"))
    free = [10]
    vars(journal.database)["measure_free_bytes"] = lambda: free[0]
    gauge = StorageGauge(journal.database, max_bytes=None, min_free_bytes=1000)
    await gauge.measure()
    with pytest.raises(StorageFullError, match="10 bytes left"):
        await gauge.refuse_when_full()
    free[0] = 2000
    await gauge.refuse_when_full()
    await journal.close()
