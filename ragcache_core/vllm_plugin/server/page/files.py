"""The page's static files: HTML, CSS and JavaScript, without data of the cache."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE = "/ragcache"
FILES = {
    PAGE: "index.html",
    **{f"{PAGE}/{name}": name for name in ("page.css", "page.js", "server.js", "dom.js", "cards.js", "tree.js")},
    f"{PAGE}/requests.js": "requests.js",
}
"""The page's paths and files, without a key; their data comes from routes with one."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""No foreign content, no inline script, no embedding in a frame; a new version shows at once."""


def read_page_file(name: str) -> tuple[bytes, str]:
    """Return a file of the page with its media type."""
    path = _FOLDER / name
    return path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8"
