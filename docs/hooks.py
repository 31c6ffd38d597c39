"""The pages of the site that are not in this folder: files of the root, notebooks, API pages, redirects.

Pages link to each other and to files of the repository as GitHub shows them; here such links are rewritten.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "dev/demo-model.md": "examples/demo_model/README.md",
    "notebooks/langchain.md": "examples/notebooks/langchain.ipynb",
    "notebooks/llamaindex.md": "examples/notebooks/llamaindex.ipynb",
}
"""Pages of the site that are another file of the repository."""
PACKAGES = {
    "api/ragcache_core.md": "ragcache_core",
    "api/langchain.md": "ragcache_integrations.langchain",
    "api/llamaindex.md": "ragcache_integrations.llamaindex",
}
NOT_IN_SEARCH = ("dev/benchmark-notes.md", "dev/paper.md", "changelog.md")
"""Pages of history, which would push the pages that users need from the first results."""
PAGES = {file: page for page, file in ELSEWHERE.items()}
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{url}">
<script>
const places = {places};
location.replace(places[location.hash.slice(1)] || "{url}" + location.hash);
</script>
<noscript><meta http-equiv="refresh" content="0; url={url}"></noscript>
<p>This page is now at <a href="{url}">{url}</a>.</p>
"""
REDIRECTS: dict[str, tuple[str, dict[str, str]]] = {
    "architecture": ("dev/architecture", {}),
    "benchmarks": (
        "evaluate",
        {
            "on-a-gpu": "evaluate/gpu",
            "real-engines-side-by-side": "evaluate/engines",
            "with-the-search-in-the-loop": "evaluate/engines#with-the-search-in-the-loop",
            "chunk-reuse": "evaluate/chunk-reuse",
            "simulation": "evaluate/simulated",
            "fleets": "evaluate/simulated#fleets",
            "predicted-beside-measured": "evaluate/simulated#predicted-beside-measured",
            "tiers": "dev/benchmark-notes#tiers",
            "pipeline": "dev/benchmark-notes#pipeline",
            "staged-search": "dev/benchmark-notes#staged-search",
            "filtered-search": "dev/benchmark-notes#filtered-search",
            "the-schedulers-thread": "dev/benchmark-notes#the-schedulers-thread",
            "forgetting": "dev/benchmark-notes#forgetting",
        },
    ),
    "chunk-reuse": (
        "guides/chunk-reuse",
        {
            "what-was-measured": "evaluate/chunk-reuse",
            "four-layers-and-twelve": "evaluate/chunk-reuse#four-layers-and-twelve",
        },
    ),
    "command-line": ("reference/cli", {}),
    "containers": ("operate/containers", {}),
    "data-at-rest": ("operate/data-at-rest", {}),
    "demo-model": ("dev/demo-model", {}),
    "design-decisions": ("dev/design-decisions", {}),
    "fleet": ("operate/fleet", {}),
    "frameworks": (
        "guides/frameworks",
        {
            "a-reranker-as-the-last-stage": "guides/retrievers#a-reranker-as-the-last-stage",
            "a-semantic-cache-of-answers": "guides/answer-cache",
        },
    ),
    "how-it-works": (
        "concepts/caching",
        {
            "the-policy": "concepts/caching#replacement-policy",
            "conversations": "concepts/conversations",
            "what-can-go-wrong": "operate/troubleshooting",
            "when-an-engine-fails": "operate/failures",
            "who-may-see-what": "operate/security",
            "a-document-that-changes-or-goes": "guides/forget",
            "reading-the-figures": "reference/metrics",
            "tools": "guides/tools",
            "configuration": "reference/configuration",
            "chunk-reuse": "reference/configuration#chunk-reuse",
            "data-at-rest": "operate/data-at-rest",
        },
    ),
    "install": ("get-started/installation", {}),
    "kernels": ("dev/kernels", {"whole-engines": "evaluate/gpu"}),
    "models": ("reference/support", {}),
    "monitoring": ("operate/monitoring", {}),
    "operating": ("operate/cache", {}),
    "overlap": (
        "concepts/overlap",
        {
            "which-chain-gains-what": "guides/overlap-a-chain",
            "an-agents-next-prompt": "concepts/conversations#an-agents-next-prompt",
            "sources-of-stages": "guides/retrievers",
            "filters-thresholds-different-documents": "guides/filters",
            "the-queue": "concepts/scheduling",
            "the-order-of-documents": "guides/document-order",
            "nearly-equal-documents": "guides/document-order#score-tolerant-substitution",
            "answers-with-a-deadline": "guides/deadlines",
            "what-can-go-wrong": "guides/overlap-a-chain#what-can-go-wrong",
            "reading-the-figures": "reference/metrics#search-statistics",
            "settings": "guides/overlap-a-chain#settings",
        },
    ),
    "paper": ("dev/paper", {}),
    "parallel": ("operate/parallel", {}),
    "proxies": ("operate/proxies", {}),
    "ray": ("operate/ray", {}),
    "refusals": ("reference/errors", {}),
    "releasing": ("dev/releasing", {}),
    "retrieval-service": ("operate/retrieval-service", {}),
    "shared-tier": ("operate/shared-tier", {}),
    "simulation": ("guides/simulate", {}),
    "tenants": ("operate/security", {}),
    "vllm-versions": ("dev/vllm-versions", {}),
    "warming": ("operate/warming", {}),
}
"""By its former address, the page that has a page's contents, and the places of its anchors that moved elsewhere."""
ROLE = re.compile(r":(?:attr|class|func|meth|mod):<code>(?:~(?:\w+\.)*|([^<&]+)\s&lt;)?([\w.]+)(?:&gt;)?</code>")
"""A reference of Sphinx's, as docstrings have them."""
CODE_OR_LINK = re.compile(r"(?ms)^```.*?^```$|`[^`\n]+`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that the navigation does not name where it says ``*``."""
    named = set(_leaves(config.nav))
    paths = (path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md")))
    others = [path.as_posix() for path in paths if path.as_posix() not in named and path.parts[0] != "results"]
    for section in config.nav or []:
        for pages in section.values():
            if "*" in pages:
                pages[pages.index("*") :] = others
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in this folder."""
    for page, file in ELSEWHERE.items():
        path = ROOT / file
        text = MarkdownExporter().from_filename(path)[0] if path.suffix == ".ipynb" else path.read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    for page, package in PACKAGES.items():
        files.append(File.generated(config, page, content=f"# `{package}`\n\n::: {package}\n"))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the site's pages, to the repository if its address is known, and otherwise nowhere."""
    here = page.file.src_uri
    if here in NOT_IN_SEARCH:
        page.meta["search"] = {"exclude": True}
    source = ROOT / ELSEWHERE[here] if here in ELSEWHERE else DOCS / here

    def rewritten(match: re.Match[str]) -> str:
        shows, text, target = match.groups()
        if target is None or re.match(r"#|\w+:", target):
            return match[0]
        path, _, anchor = target.partition("#")
        file = Path(os.path.normpath(source.parent / path)).relative_to(ROOT).as_posix()
        place = PAGES.get(file) or file.removeprefix("docs/")
        if files.get_file_from_path(place) is not None:
            to = os.path.relpath(place, Path(here).parent) + (anchor and f"#{anchor}")
            return f"{shows}[{text}]({to})"
        if not (ROOT / file).exists():
            return match[0]  # which the build complains of
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{file})" if config.repo_url else text

    return CODE_OR_LINK.sub(rewritten, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show what docstrings say in reStructuredText: names without their roles, examples without their colons."""
    named = ROLE.sub(lambda match: f"<code>{match[1] or match[2]}</code>", html)
    return named.replace("<p>::</p>", "").replace("::</p>", ":</p>")


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write the redirects, and refuse an API reference that lacks a public attribute of an exported class.

    Raises:
        PluginError: names the attributes without an anchor, or the redirect that leads nowhere.
    """
    write_redirects(Path(config.site_dir))
    anchors = set[str]()
    for page in PACKAGES:
        html = (Path(config.site_dir) / page).with_suffix("") / "index.html"
        anchors |= set(re.findall(r'\bid="?([\w.]+)', html.read_text("utf-8")))
    if missing := [name for name in _public_names() if name not in anchors]:
        raise PluginError(f"no page of the API reference has {', '.join(missing)}")


def write_redirects(site: Path) -> None:
    """Write a page at each former address that leads to the present one; its anchors may lead to pages of their own.

    Raises:
        PluginError: names a present page, or an anchor on it, that the site does not have.
    """
    for old, (page, anchors) in REDIRECTS.items():
        for target in (page, *anchors.values()):
            path, _, anchor = target.partition("#")
            built = site / path / "index.html"
            if not built.exists() or (anchor and f'id="{anchor}"' not in built.read_text("utf-8")):
                raise PluginError(f"the redirect of {old} leads to {target}, which the site does not have")
        folder = site / old
        folder.mkdir(parents=True, exist_ok=True)
        places = json.dumps({anchor: _url(target) for anchor, target in anchors.items()})
        (folder / "index.html").write_text(REDIRECT.format(url=_url(page), places=places), "utf-8")


def _url(target: str) -> str:
    """Return the address of ``page#anchor`` relative to a former page of the site's root."""
    path, _, anchor = target.partition("#")
    return f"../{path}/" + (anchor and f"#{anchor}")


def _public_names() -> list[str]:
    """Return what the packages export, and the public attributes of exported classes, inherited ones included."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    for package in sorted({package.partition(".")[0] for package in PACKAGES.values()}):
        loader.load(package)
    loader.resolve_aliases()
    names = list[str]()
    for package in PACKAGES.values():
        module = loader.modules_collection[package]
        for name in module.exports or ():
            exported = module[str(name)]
            members = exported.all_members if exported.is_class else {}
            names += [f"{package}.{path}" for path in (name, *(f"{name}.{m}" for m in members if _is_public(m)))]
    return names


def _is_public(name: str) -> bool:
    return not name.startswith("_") and name != "model_config"


def _leaves(nav: Any) -> list[str]:
    """Return the pages that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav or []
    return [page for part in parts for page in _leaves(part)]
