"""Groups as people look at them: how full each one is, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcm.console import formats
from kvcm.console.charts import Values
from kvcm.console.views.history import History

__all__ = ["GroupCard", "group_card", "group_cards", "losses_of"]

Document = Mapping[str, Any]

_FULL: Final = 0.98
_SEVERITIES: Final = ("page", "ticket", "info")
_TROUBLES: Final = {
    ("KvcmGroupFull", "page"): "full",
    ("KvcmGroupNearlyFull", "ticket"): "nearly full",
    ("KvcmGroupWithoutStorage", "page"): "no storage",
    ("KvcmReclaimStuck", "ticket"): "above its mark",
}
"""Alerts about groups in a word or two: what limits one need not be its own quota."""
_KINDS: Final = {"page": "bad", "ticket": "warn", "info": "plain"}


@dataclass(frozen=True, slots=True)
class GroupCard:
    """A group at one glance.

    Attributes:
        name: its name.
        usage: its document of `/v1/usage`.
        state: in a word or two.
        kind: of that word: good, busy, warn, bad, plain.
        summary: what is wrong, "" where nothing is.
        why: why it is as it is, in plain words.
        advice: what to do; "" where nothing has to be done.
        hit_ratio: of the last five minutes.
        hit_ratios: of late.
        refused: writes refused for want of room in the last five minutes.
    """

    name: str
    usage: Document
    state: str
    kind: str
    summary: str
    why: str
    advice: str
    hit_ratio: float | None
    hit_ratios: Values
    refused: float

    @property
    def total(self) -> Mapping[str, int]:
        """What it uses and may use in total."""
        total: Mapping[str, int] = self.usage["total"]
        return total

    @property
    def is_in_trouble(self) -> bool:
        """Whether somebody may not write."""
        return self.kind == "bad" or self.refused > 0

    @property
    def share(self) -> float:
        """How much of its quota is used."""
        capacity = self.total["capacity_bytes"]
        return self.total["used_bytes"] / capacity if capacity > 0 else 0.0

    @property
    def key_count(self) -> int:
        """Blocks in all its instances."""
        return sum(instance["key_count"] for instance in self.usage["instances"])


def group_cards(groups: Sequence[Document], alerts: Sequence[Document], history: History) -> list[GroupCard]:
    """Return the groups, those in trouble first, then the fullest."""
    cards = [group_card(group, alerts, history) for group in groups]
    order = {kind: place for place, kind in enumerate(("bad", "warn", "busy", "plain", "good"))}
    return sorted(cards, key=lambda card: (order[card.kind], -card.share, card.name))


def group_card(group: Document, alerts: Sequence[Document], history: History) -> GroupCard:
    """Return one group with what is wrong with it.

    Args:
        group: its document of `/v1/usage`.
        alerts: of `/v1/alerts`, of whatever.
        history: of the last hour.
    """
    name = group["name"]
    evicted = history.mean("evicted_bytes_per_second", name) or 0.0
    refused = history.amount("refused_writes_per_second", name)
    alert = _worst_of(name, alerts)
    state, kind = _state(group["total"], evicted, refused)
    if alert is not None:
        state, kind = _TROUBLES.get((alert["name"], alert["severity"]), state), _KINDS[alert["severity"]]
    return GroupCard(
        name,
        group,
        state,
        kind,
        alert["summary"] if alert else "",
        alert["reason"] if alert else _why(group, evicted, refused),
        alert["advice"] if alert else "",
        history.mean("hit_ratio", name),
        history.lately("hit_ratio", name),
        refused,
    )


def _worst_of(name: str, alerts: Sequence[Document]) -> Document | None:
    own = [alert for alert in alerts if alert["subject"] == {"kind": "group", "name": name}]
    return min(own, key=lambda alert: _SEVERITIES.index(alert["severity"]), default=None)


def _state(total: Mapping[str, int], evicted: float, refused: float) -> tuple[str, str]:
    used, capacity = total["used_bytes"], total["capacity_bytes"]
    if capacity == 0:
        return "no quota", "warn"
    if used >= _FULL * capacity > 0:
        return "full", "bad"
    if refused:
        return "refuses writes", "bad"
    if used - total["deleting_bytes"] > total["high_mark_bytes"] >= 0:
        return "above its mark", "warn"
    return ("evicting", "busy") if evicted else ("has room", "good")


def _why(group: Document, evicted: float, refused: float) -> str:
    total = group["total"]
    if total["capacity_bytes"] == 0:
        return "Its quota is 0: nothing may be written."
    if refused:
        pins = f", and {formats.size(group['pinned_bytes'])} are pinned" if group["pinned_bytes"] else ""
        said = f"{formats.count(max(1.0, refused))} writes found no room in the last five minutes"
        return f"{said}: {formats.size(max(0, total['capacity_bytes'] - total['used_bytes']))} are free now{pins}."
    return _going_on(total, evicted)


def _going_on(total: Mapping[str, int], evicted: float) -> str:
    used, high, low = total["used_bytes"], total["high_mark_bytes"], total["low_mark_bytes"]
    waiting = formats.size(total["deleting_bytes"])
    if total["deleting_bytes"] and used >= _FULL * total["capacity_bytes"]:
        return f"{waiting} of it are evicted and wait for their deletion: little or nothing fits until then."
    if high < 0:
        free = formats.size(max(0, total["capacity_bytes"] - used))
        return f"Nothing is evicted before it is full: it has no mark. {free} are free."
    if used - total["deleting_bytes"] > high:
        return f"It is above {formats.size(high)}, where eviction begins: that is at work down to {formats.size(low)}."
    if evicted:
        rate = f"{formats.size(evicted)}/s"
        return f"Eviction keeps it between {formats.size(low)} and {formats.size(high)}: {rate} leave on average."
    leaving = f", and {waiting} wait for their deletion" if total["deleting_bytes"] else ""
    free = formats.size(high - used + total["deleting_bytes"])
    return f"{free} may be written before eviction begins{leaving}."


def losses_of(usage: Document) -> list[str]:
    """Return what happens when a group is removed, in sentences."""
    count, used = len(usage["instances"]), formats.size(usage["total"]["used_bytes"])
    said = ["The group and its limits are forgotten."]
    if count:
        instances = "Its instance stays" if count == 1 else f"Its {count} instances stay"
        said.append(f"{instances} readable and refuse writes, until they are removed themselves.")
        said.append(f"The {used} that it uses stay where they are until then.")
    return said
