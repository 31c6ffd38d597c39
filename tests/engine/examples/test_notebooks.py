"""The notebooks run as they stand, in a kernel of their own on the session's engine, and say what they show."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ragcache_core.client import Engine
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_comes_out_when_it_is_run(
    path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_BASE_URL", engine.base_url)
    monkeypatch.setenv("RAGCACHE_API_KEY", engine.api_key)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    shown = printed(notebook)
    assert len(shown) >= 5
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, startup_timeout=180, kernel_name="python3", resources=where).execute()
    assert "".join(printed(notebook)) == "".join(shown), "in however many pieces a stream came"


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what its cells print and return, without figures: cached tokens and times are another engine's."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    return [re.sub(r"\d[\d,.]*", "#", text) for text in texts]
