"""Tables for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

__all__ = ["Check", "checks_table", "turns_table"]


@dataclass(frozen=True)
class Check:
    """One thing that must hold: name, found, wanted."""

    what: str
    found: str
    wanted: str
    ok: bool

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def turns_table(rows: list[dict[str, Any]]) -> Table:
    """Return one line per engine and turn."""
    table = Table(title="Turns")
    titles = ("engine", "turn", "prompt", "loaded", "TTFT alone", "TTFT with", "ratio", "MB read", "MB stored")
    for title in titles:
        table.add_column(title, justify="left" if title == "engine" else "right")
    for row in rows:
        alone, with_manager = row["first_token_seconds_alone"], row["first_token_seconds"]
        table.add_row(
            row["engine"],
            str(row["turn"]),
            f"{row['prompt_tokens']:,}",
            f"{row['loaded_tokens']:,}",
            f"{alone:.2f}",
            f"{with_manager:.2f}",
            f"{with_manager / alone:.2f}",
            f"{row['bytes_loaded'] / 1e6:.1f}",
            f"{row['bytes_saved'] / 1e6:.1f}",
        )
    return table


def checks_table(checks: list[Check]) -> Table:
    """Return one line per check."""
    table = Table(title="Checks")
    for title in ("", "check", "found", "wanted"):
        table.add_column(title)
    for check in checks:
        table.add_row("[green]ok[/]" if check.ok else "[red]FAILED[/]", check.what, check.found, check.wanted)
    return table
