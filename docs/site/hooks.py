"""What mkdocs does not do by itself: links that leave docs/ lead to copies of what they name.

On a forge such a link shows the file; in the site it leads to a page with its text, or with what a folder holds. So the
same documents work in both places, and without a network. Links that say the name of a page's file say its title here.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown", "on_post_page"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_NAMED = re.compile(r"\[(?:docs/)?([\w/]+\.md)\](?=\(([^)#\s]+\.md)[^)]*\))")
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml", ".proto": "protobuf",
              ".sh": "sh", ".md": "markdown", ".css": "css", "": "text"}  # fmt: skip
_MOST_BYTES = 300_000


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for everything outside the site's folder that a page of it links."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path is not None]
    linked = {target for page in pages for target in _left(page)}
    for target in sorted(linked):
        files.append(File.generated(config, _place(target), content=_text(target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave the folder lead to those pages."""
    source = page.file.abs_src_path
    if source is None:
        return markdown
    up = "../" * page.file.src_uri.count("/")

    def rewritten(found: re.Match[str]) -> str:
        target = _outside(Path(source), found[1])
        return found[0] if target is None else f"{up}{_place(target)}"

    return _LINK.sub(rewritten, _NAMED.sub(lambda found: f"[{_title(Path(source), found)}]", markdown))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Name the search's dialog, which the theme does not."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def _title(document: Path, named: re.Match[str]) -> str:
    """Return what a page is called, where a link says its file's name: on a forge one looks for files."""
    target = (document.parent / named[2]).resolve()
    return target.read_text().partition("\n")[0].removeprefix("# ") if target.is_relative_to(DOCS) else named[1]


def _left(document: Path) -> set[Path]:
    targets = (_outside(document, found[1]) for found in _LINK.finditer(document.read_text()))
    return {target for target in targets if target is not None}


def _outside(document: Path, link: str) -> Path | None:
    """Return what a link names, where that is in the repository and no page or picture of the site."""
    target = (document.parent / link).resolve()
    if not target.exists() or not target.is_relative_to(ROOT):
        return None
    examples = DOCS / "examples"
    ours = target.is_relative_to(DOCS) and not target.is_relative_to(examples) and target.is_file()
    return None if ours or target == examples / "demo/README.md" else target


def _place(target: Path) -> str:
    parts = (part.lstrip(".") for part in target.relative_to(ROOT).parts)  # mkdocs leaves out what begins with a dot
    return f"source/{'/'.join(parts)}{'/index' if target.is_dir() else ''}.md"


def _text(target: Path) -> str:
    name = target.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {name}\n\n"
    if target.is_dir():
        return head + "".join(f"    {each}\n" for each in _tracked(name))
    body = target.read_text()
    if len(body) > _MOST_BYTES:
        return f"{head}{len(body):,} bytes, left out here: look at the file in the repository.\n"
    fence = "`" * (2 + max((len(run) for run in re.findall("`+", body)), default=1))
    return f"{head}{fence} {_LANGUAGES.get(target.suffix, 'text')}\n{body}\n{fence}\n"


def _tracked(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    return listed.stdout.splitlines() or sorted(path.name for path in (ROOT / folder).iterdir())
