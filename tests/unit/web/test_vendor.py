"""The files of others are those that were committed, each with its licence, and the page loads nothing from elsewhere."""

import hashlib
import re
from pathlib import Path

from node.web.api_routes import STATIC

VENDOR = STATIC / "vendor"
ELSEWHERE = re.compile(
    r"""(?:src|href)=["'](?:https?:)?//|@import|url\(\s*["']?(?:https?:)?//|import[^;]*["']https?:"""
)


def test_files_of_others_are_unchanged_and_named() -> None:
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split()) for line in lines)
    there = {str(path.relative_to(VENDOR)) for path in VENDOR.rglob("*") if path.is_file()}
    assert {str(Path(name)) for name in sums} == there - {"SHA256SUMS", "SOURCES.md"}
    for name, expected in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == expected, name


def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    own = [path for path in STATIC.glob("*") if path.suffix in (".html", ".js", ".css", ".svg")]
    assert len(own) >= 8
    for path in own:
        text = path.read_text(encoding="utf-8")
        assert not ELSEWHERE.search(text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page)
