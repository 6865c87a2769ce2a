"""Every link from a page to another one, to a heading or to a file of the repository leads somewhere. No network."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "plugins/*/README.md", "integrations/*/README.md", "examples/**/README.md")
    for path in ROOT.glob(pattern)
    if not {".venv", ".tools"} & set(path.parts)
)
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)|\b(?:href|src)=\"([^\"]+)\"", re.MULTILINE
)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.\-]*:|//", re.IGNORECASE)
#: Which of two pictures the theme of the pages shows: no heading.
_THEME = {"only-light", "only-dark"}


def links_of(page: Path) -> list[str]:
    """Links that leave no repository, as they are written."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text("utf-8")))
    found = [next(filter(None, match.groups())) for match in _LINK.finditer(text)]
    return [link for link in found if not _ELSEWHERE.match(link)]


def anchors_of(page: Path) -> set[str]:
    """Headings that a link finds both where the pages are built and where the repository is read."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    titles = [
        re.sub(r"[`*]|\]\([^)]*\)|\[", "", line) for line in re.findall(r"^#{1,6} +(.+?) *#* *$", text, re.MULTILINE)
    ]
    return set(map(_built, titles)) & set(map(_read, titles))


def _built(title: str) -> str:
    """As Python-Markdown has it."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _read(title: str) -> str:
    """As GitHub and others have it: each blank is a hyphen."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in links_of(page):
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        there = target.exists() and target.is_relative_to(ROOT)
        if not there or (anchor and anchor not in _THEME and anchor not in anchors_of(target)):
            lost.append(link)
        elif page.parent == DOCS and not target.is_relative_to(DOCS):
            lost.append(f"{link} (it is not on the built pages)")
    assert lost == []


def nav() -> list[str]:
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    block = re.search(r"^nav:\n((?:[ ]+.*\n)+)", settings, re.MULTILINE)
    assert block is not None
    return re.findall(r"([\w\-./]+\.md)$", block[1], re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(nav()) == sorted(path.name for path in DOCS.glob("*.md"))


def test_every_page_can_be_reached_from_the_first_one() -> None:
    seen: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            linked = (link.partition("#")[0] for link in links_of(page))
            waiting += [(DOCS / path).resolve() for path in linked if path.endswith(".md") and "/" not in path]
    assert seen == set(DOCS.glob("*.md"))


def test_every_picture_is_shown_and_described() -> None:
    shown: set[str] = set()
    for page in PAGES:
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)#\s]+)", page.read_text("utf-8")):
            assert words.strip(), f"{page.name}: {target} has no alternative text"
            shown.add(Path(target).name)
    pictures = {path.name for path in (*DOCS.glob("images/*"), *DOCS.glob("*.svg"))}
    assert pictures <= shown


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](b.md#c) and ![d](e.png#only-dark)", ["b.md#c", "e.png#only-dark"]),
        ("`[a](b.md)`\n\n```\n[a](c.md)\n```\n[x](y.md)", ["y.md"]),
        ('[a](https://e.org) [b](mailto:x) <img src="f.svg">\n\n[r]: g.md', ["f.svg", "g.md"]),
    ],
)
def test_links_are_found(tmp_path: Path, text: str, links: list[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    assert links_of(page) == links


def test_headings_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n\n```\n# no heading\n```\n\n## `code`, and [a link](x.md)\n\n## a & b\n", "utf-8")
    assert anchors_of(page) == {"one-two", "code-and-a-link"}  # the last one's two names differ
