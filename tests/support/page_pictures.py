"""Take the pictures of the page that the documentation shows: ``make pictures`` writes ``docs/pictures/page-*.png``.

An engine of the demo model, with tiers as small as the demo's, is asked the demo's questions; it needs Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from examples._shared import DEMO_MODEL, Options, demo_questions, open_demo_store, open_engine
from examples.demo import langchain_chain, three_tiers
from tests.support.browser import DESK, browser, darken, resize, why_no_browser
from tests.support.waiting import until

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
_NUM_DOCUMENTS = (4, 8)
_NUM_QUESTIONS = 24
_MOST_BYTES = 300_000


def main() -> None:
    """Write a picture for the day, and one for the night."""
    if why := why_no_browser():
        sys.exit(f"ragcache: error: {why}")
    options = Options(str(DEMO_MODEL), None, False)
    questions = [q["question"] for q in demo_questions("single")[:_NUM_QUESTIONS]]
    with (
        tempfile.TemporaryDirectory(prefix="ragcache-pictures-") as folder,
        open_demo_store() as store,
        open_engine(options, three_tiers(options, Path(folder))) as engine,
        browser() as window,
    ):
        asks = [langchain_chain(engine, store, number) for number in _NUM_DOCUMENTS]
        resize(window, (DESK[0], 1400))
        window.get(engine.base_url.removesuffix("/v1") + "/ragcache")
        window.execute_script(f"sessionStorage.setItem('ragcache-key', '{engine.api_key}'); location.reload()")
        for question in (*questions, *reversed(questions), *questions[::3]):
            for ask in asks:
                ask(question)
        state = window.find_element("id", "state")
        assert until(lambda: state.text == "live", 20)
        assert until(lambda: "ago" in window.find_element("id", "requests").text, 20)
        window.execute_script("document.querySelector('#requests details').open = true; scrollTo(0, 0)")
        for name in ("light", "dark"):
            darken(window, is_dark=name == "dark")
            path = PICTURES / f"page-{name}.png"
            window.save_screenshot(str(path))
            assert path.stat().st_size < _MOST_BYTES, f"{path} is too large for the repository"
            print(path)


if __name__ == "__main__":
    main()
