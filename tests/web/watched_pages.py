"""Windows of a browser that record errors behind a page, and faults that its readers would see."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from axe_playwright_python.base import AXE_SCRIPT
from thoroughness import is_thorough

if TYPE_CHECKING:
    from console_site import ConsoleSite
    from playwright.sync_api import Browser, Locator, Page, Response

__all__ = ["APPEARANCES", "Watch", "faults_of", "keyboard_faults", "sign_in", "watched"]

APPEARANCES: Final = [(1280, "light"), (390, "dark"), *([(1280, "dark"), (390, "light")] if is_thorough() else [])]
"""Widths of windows in pixels, and colours. The first two show what depends on either of them."""

_HEIGHT: Final = 900
_BY_OBSERVE: Final = ("color-contrast", "link-in-text-block", "scrollable-region-focusable", "target-size")
"""Rules of axe whose findings depend on width and colours."""
_GRAVE: Final = {"serious", "critical"}
_RAW: Final = re.compile(r"""[{\[]\s*["'{\[]|["']:\s|\b(None|null|undefined|NaN)\b|\b[A-Z]{2,}_[A-Z0-9_]+\b""")


@dataclass
class Watch:
    """A window and what it noticed.

    Attributes:
        page: the window.
        base: of the console.
        faults: errors of scripts, requests to elsewhere, failed ones but for pages, which may refuse something.
    """

    page: Page
    base: str
    faults: list[str] = field(default_factory=list)

    def go(self, path: str) -> Response:
        """Open a page of the console."""
        answer = self.page.goto(self.base + path)
        assert answer is not None
        return answer

    def press(self, name: str, *, role: Any = "button") -> None:
        """Press what has this name, with the keyboard; where that leads to a page, wait for it."""
        self.press_in(self.page.get_by_role(role, name=name, exact=True))

    def press_in(self, target: Locator) -> None:
        """Press an element that is already located."""
        target.focus()
        if target.evaluate("node => node.matches('a[href]') || Boolean(node.form && node.type === 'submit')"):
            with self.page.expect_navigation():
                target.press("Enter")
        else:
            target.press("Enter")

    @property
    def said(self) -> str:
        """The page's notice of a change, or its errors."""
        return "\n".join(self.page.locator(".said, .field.wrong .hint").all_inner_texts())

    def fault(self, label: str) -> str:
        """Return the message beside a wrong field."""
        return self.page.locator(".field.wrong", has_text=label).locator("strong").inner_text()

    def notice(self) -> None:
        """Begin to notice."""
        self.page.on("console", lambda said: self._receive(said.type, said.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self._ask(request.url))
        self.page.on("response", self._answer)

    def _receive(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"} and not text.startswith("Failed to load resource"):  # see _answer
            self.faults.append(text)

    def _ask(self, url: str) -> None:
        if not url.startswith(self.base + "/"):
            self.faults.append(f"asked {url}")

    def _answer(self, answer: Response) -> None:
        if answer.status >= (500 if answer.request.is_navigation_request() else 400):
            self.faults.append(f"{answer.status} {answer.url}")


@contextlib.contextmanager
def watched(browser: Browser, site: ConsoleSite, role: str = "", **options: Any) -> Iterator[Watch]:
    """Open a window of its own, signed in with the key of a role if one is given; nothing may go wrong in it."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": _HEIGHT}, **options})
    watch = Watch(context.new_page(), site.base)
    watch.page.set_default_timeout(30_000)
    watch.notice()
    try:
        if role:
            sign_in(watch, site.keys[role])
        yield watch
    finally:
        context.close()
    assert watch.faults == []


def sign_in(watch: Watch, key: str) -> None:
    """Sign in with a key."""
    watch.go("/console/login")
    watch.page.get_by_label("API key").fill(key)
    watch.press("Sign in")


def faults_of(watch: Watch) -> list[str]:
    """Return the faults of the page that a window shows, wide and narrow, light and dark."""
    page = watch.page
    page.evaluate("() => document.querySelectorAll('details').forEach(each => each.open = true)")
    page.evaluate(AXE_SCRIPT)
    found = [f"raw: {text!r}" for text in _raw_texts(page)]
    for number, (width, scheme) in enumerate(APPEARANCES):
        page.set_viewport_size({"width": width, "height": _HEIGHT})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        faults = [*_axe_faults(page, _BY_OBSERVE if number else ()), *_crowding(page)]
        found += [f"{width} {scheme}: {fault}" for fault in faults]
    return found


def _raw_texts(page: Page) -> list[str]:
    lines = page.locator("body").inner_text().splitlines()
    return [line for line in lines if _RAW.search(line)]


def _axe_faults(page: Page, rules: Sequence[str]) -> list[str]:
    """Return what axe finds by these rules, by all of them where none are given."""
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    report = page.evaluate("options => axe.run(options)", options)
    grave = [found for found in report["violations"] if found["impact"] in _GRAVE]
    faults = [(found, node) for found in grave for node in found["nodes"]]
    return [f"{found['id']} ({found['impact']}): {node['target']} {node['html'][:120]}" for found, node in faults]


def _crowding(page: Page) -> list[str]:
    """Return elements that are beyond the window, cut off, or over another element."""
    return list(page.evaluate(_CROWDING))


_CROWDING: Final = """() => {
  const found = [], root = document.documentElement;
  if (root.scrollWidth > innerWidth) found.push(`scrolls sideways: ${root.scrollWidth} of ${innerWidth}`);
  const scrolls = node => node && node !== document.body
    && (['auto', 'scroll'].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  const shown = [...document.querySelectorAll('main *, header *, nav *')].filter(node =>
    node.checkVisibility({visibilityProperty: true}) && !node.closest('svg') && !scrolls(node.parentElement)
    && ![...node.getClientRects()].every(box => box.width < 2));
  for (const node of shown) {
    const box = node.getBoundingClientRect();
    if (box.right > innerWidth + 1 || box.left < -1) found.push(`beyond the window: ${node.outerHTML.slice(0, 120)}`);
  }
  const leaves = 'a, button, input, select, textarea, summary, h1, h2, h3, dt, label';
  const boxes = shown.filter(node => node.matches(leaves))
    .flatMap(node => [...node.getClientRects()].map(box => [node, box]));  // a link may be on two lines
  for (let one = 0; one < boxes.length; one++) for (let two = one + 1; two < boxes.length; two++) {
    const [a, p] = boxes[one], [b, q] = boxes[two];
    if (a.contains(b) || b.contains(a)) continue;
    const width = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const height = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (width > 2 && height > 2) found.push(`over one another: ${[a, b].map(node => node.outerHTML.slice(0, 80))}`);
  }
  return found;
}"""


def keyboard_faults(watch: Watch) -> list[str]:
    """Walk through a page with the tab key; return elements out of reach, out of order, or without focus."""
    page = watch.page
    page.evaluate("document.activeElement?.blur()")
    wanted = page.evaluate(_REACHABLE)
    for _ in range(wanted):
        page.keyboard.press("Tab")
    walked = page.evaluate("window.walked")
    found = [f"no visible focus: {html}" for _, html, is_shown in walked if not is_shown]
    if [place for place, _, _ in walked] != list(range(wanted)):
        found.append(f"out of order, or left out: {walked}")
    return found


_REACHABLE: Final = """() => {
  const all = [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')];
  const taken = new Set();
  const shown = all.filter(node => {
    if (node.disabled || node.type === 'hidden' || !node.checkVisibility({visibilityProperty: true})) return false;
    if (node.type !== 'radio') return true;
    const alone = node.checked || ![...document.getElementsByName(node.name)].some(each => each.checked);
    if (!alone || taken.has(node.name)) return false;
    return taken.add(node.name);
  });
  window.walked = [];
  document.addEventListener('focusin', ({target}) => {
    const style = getComputedStyle(target), box = target.getBoundingClientRect();
    const isOutlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
    const isShown = isOutlined && box.right > 0 && box.bottom > 0;
    window.walked.push([shown.indexOf(target), target.outerHTML.slice(0, 100), isShown]);
  });
  return shown.length;
}"""
