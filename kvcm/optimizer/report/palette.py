"""Colours of charts, each a variable of the page's style sheet: light, dark and print have their own values.

Those of policies are by Okabe and Ito, which people with any kind of colour blindness tell apart, darkened where thin
lines need it; policies differ in dashes and markers too.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["FAINT", "INK", "MUTED", "PAPER", "SERIES", "as_variables", "policy_style", "style_sheet"]

INK, MUTED, FAINT, PAPER = "#010203", "#010204", "#010205", "#010206"
"""What charts are drawn in: text and axes, secondary text, grids, background. Stand-ins, see `as_variables`."""

SERIES = tuple(f"#0103{number:02x}" for number in range(8))
"""Series of charts, as stand-ins."""

_LIGHT = ("#0072b2", "#00805d", "#c8500a", "#a8457f", "#9a6a00", "#2a8fc7", "#6b7280", "#8a5a44")
_DARK = ("#5cb2ec", "#3ec79b", "#ff8a4c", "#e58bbf", "#e3b341", "#8fd0f5", "#a3acb9", "#cfa08a")
_NAMES = {INK: "ink", MUTED: "muted", FAINT: "faint", PAPER: "paper"} | {
    color: f"series-{number}" for number, color in enumerate(SERIES)
}
_POLICIES = {
    "lru": (0, "-", "o"),
    "leaf_lru": (1, "-", "s"),
    "lfu": (2, "--", "^"),
    "fifo": (3, "-.", "v"),
    "sieve": (4, "--", "D"),
    "s3fifo": (5, "-", "P"),
    "ttl": (6, ":", "X"),
    "random_lru": (7, ":", "*"),
}
BOUND = "belady"


def policy_style(policy: str) -> tuple[str, str, str]:
    """Return the colour, dashes and marker of a policy's label, the same in every chart."""
    name = policy.split(":")[0]
    if name == BOUND:
        return INK, "--", ""
    number, dashes, marker = _POLICIES.get(name, (6, ":", "X"))
    return SERIES[number], dashes, marker


def as_variables(svg: str) -> str:
    """Return a drawing in which each stand-in is a variable of the style sheet."""
    for color, name in _NAMES.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg


def style_sheet() -> str:
    """Return the variables of series, light and dark."""
    return (
        f":root{{{_series(_LIGHT)}}}\n"
        f"@media screen and (prefers-color-scheme: dark){{:root{{{_series(_DARK)}}}}}\n"
    )  # fmt: skip


def _series(colors: Sequence[str]) -> str:
    return ";".join(f"--series-{number}:{color}" for number, color in enumerate(colors))
