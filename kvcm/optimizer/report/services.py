"""Several traces as several services: which of them room is worth most to, and how to split a budget."""

from __future__ import annotations

from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.markup import table
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.study import Services

__all__ = ["services"]


def services(found: Services, key: str) -> Section:
    """Return the section on several services."""
    rows = [
        (
            rank.name,
            f"{amounts.money(rank.per_gib_hour, 4)} per GiB-hour",
            amounts.size(rank.next_bytes),
            amounts.size(rank.best_bytes),
            amounts.money(rank.best_net_per_hour, 2),
        )
        for rank in found.ranks
    ]
    ranked = table(
        ("service", "first room saves", "up to", "best alone", "net per hour then"),
        rows,
        caption="Services by what a GiB saves, the most first",
    )
    columns = (
        ("budget", *(share.name for share in found.splits[0].shares), "net per hour", "exact") if found.splits else ()
    )
    split = [
        (
            amounts.size(budget),
            *(amounts.size(share.stored_bytes) for share in each.shares),
            amounts.money(each.net_per_hour, 2),
            "yes" if each.is_exact else f"within {amounts.money(each.at_most - each.net_per_hour, 2)}",
        )
        for budget, each in zip(found.budgets, found.splits, strict=True)
    ]
    return Section(
        key,
        "Services compared",
        f"{len(found.ranks)} traces as services that could share one store: where room saves most, and how a "
        "budget is split so "
        "that all together return most.",
        (ranked, table(columns, split, caption="Budgets of bytes, split so that the net value is greatest")),
    )
