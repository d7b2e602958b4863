"""What `kvcm index verify` found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = ["AuditReport", "Finding", "Repair"]

_MOST_FINDINGS: Final = 10_000


class Repair(NamedTuple):
    """What may be changed.

    Attributes:
        repair: whatever can be mended without losing anything.
        drop_unreadable: also drop what cannot be read.
    """

    repair: bool = False
    drop_unreadable: bool = False


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        check: the checked part, one word.
        where: the place.
        what: the defect.
        repair: what a repair does about it.
        is_mended: whether it was done.
    """

    check: str
    where: str
    what: str
    repair: str
    is_mended: bool = False


@dataclass(slots=True)
class AuditReport:
    """Findings, and counts of checked documents and records.

    Attributes:
        findings: the first ten thousand.
        more: number of those that are not listed.
        unconfirmed: what changed all the time, so that nothing could be said.
        checked: numbers by name.
    """

    findings: list[Finding] = field(default_factory=list)
    more: int = 0
    unconfirmed: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        """Whether everything could be checked and nothing was found."""
        return not self.findings and not self.unconfirmed

    @property
    def is_repaired(self) -> bool:
        """Whether all findings are repaired."""
        return not self.more and all(finding.is_mended for finding in self.findings)

    def add(self, finding: Finding) -> None:
        """List a finding."""
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(finding)
        else:
            self.more += 1
