"""What clients ask of two managers on one store, and what they know of their sessions."""

from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import strategies as st

from kvcm.cache.sessions import FinishedWrite, WriteSession

POOL = tuple(range(6))


class Op(NamedTuple):
    """What a client asks of a manager, or a duty of it."""

    node: int
    verb: str
    keys: list[int]
    pick: int
    flag: bool


WRITES = ("start", "start", "write", "write", "insist", "insist", "finish", "repeat", "repeat", "contest", "contest")
VERBS = (*WRITES, "renew", "remove", "trim", "read", "lease")
DUTIES = ("expire", "expire", "delete", "delete", "purge")
OPS = st.builds(
    Op,
    st.integers(0, 1),
    st.sampled_from([*VERBS, *DUTIES, "reinstall", "tick"]),
    st.one_of(
        st.integers(1, len(POOL)).map(lambda end: list(POOL[:end])),
        st.lists(st.sampled_from(POOL), min_size=1, max_size=4),
    ),
    st.integers(0, 30),
    st.booleans(),
)
CRASHES = st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 1), st.integers(0, 40)))
"""(which node, after how many turns of the loop)"""


@dataclass
class Written:
    """A session as its client knows it.

    Attributes:
        since: step at which it was asked for.
        decisions: what accepted finishes asked for.
        told: what they were told.
        known_until: unix time until which a finish may be repeated, at least.
    """

    session: WriteSession
    since: int
    decisions: set[tuple[bool, ...]] = field(default_factory=set)
    told: set[FinishedWrite] = field(default_factory=set)
    known_until: float = 0.0
