"""Which shared counters a change of usage counts in (`kvcm.store.redis.quota`).

* A group's account: `b<storage type>/<storage>` bytes in a place, `k<uid>` blocks of an instance. Its quota, in total
  and by type, and the key limits of its instances are checked there.
* A storage's account: `b<group>` bytes of a group. The storage's capacity and what groups are guaranteed on it.
* One account over all: `b<group>` bytes of a group. Global quotas: not an account each, so that a group that is given
  another quota takes its usage along.

All accounts are reported to always, also while there is no limit, so that one that is set holds at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from kvcm.cache.limits import MOST_KEYS
from kvcm.cache.usage import Reservation
from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import Place
from kvcm.model.names import path_component
from kvcm.model.storages import StorageType
from kvcm.store.redis.quota import Demand, TotalLimit

__all__ = [
    "OVERALL",
    "Booking",
    "Census",
    "bookings",
    "bytes_by_group",
    "bytes_by_place",
    "counted",
    "field_title",
    "fields_by_account",
    "group_account",
    "keys_field",
    "storage_account",
]

OVERALL = "a.all"

Census = Mapping[str, Mapping[int, MetaIndex]]
"""Every index by group and uid, also those of instances that are being removed."""

Booking = tuple[str, list[Demand], list[TotalLimit]]
"""Account, what is reserved there, and the limits that have to hold."""


def group_account(group_name: str) -> str:
    """Return the account of a group."""
    return f"g.{path_component(group_name)}"


def storage_account(storage: str) -> str:
    """Return the account of a storage."""
    return f"s.{path_component(storage)}"


def keys_field(uid: int) -> str:
    """Return the field that counts the blocks of an instance."""
    return f"k{uid}"


def _group_field(group_name: str) -> str:
    return f"b{group_name}"


def _type_prefix(storage_type: StorageType) -> str:
    return f"b{int(storage_type)}/"


def _place_field(place: Place) -> str:
    return f"{_type_prefix(place.storage_type)}{place.storage}"


def bytes_by_place(fields: Mapping[str, int]) -> dict[Place, int]:
    """Read the bytes in a group's account."""
    found: dict[Place, int] = {}
    for name, value in fields.items():
        if name[0] == "b" and value:
            number, _, storage = name[1:].partition("/")
            found[Place(storage, StorageType(int(number)))] = value
    return found


def bytes_by_group(fields: Mapping[str, int]) -> dict[str, int]:
    """Read the bytes in a storage's account, or in that over all."""
    return {name[1:]: value for name, value in fields.items()}


def field_title(account: str, field: str) -> str:
    """Return what a field counts, for people."""
    if not account.startswith("g."):
        return f"bytes of group {field[1:]!r}"
    if field[0] == "k":
        return f"blocks of registration {field[1:]}"
    ((place, _),) = bytes_by_place({field: 1}).items()
    return f"bytes on {place.storage} ({place.storage_type.kind})"


def fields_by_account(
    group_name: str, uid: int, difference: Mapping[Place, int], keys: int
) -> dict[str, dict[str, int]]:
    """Return what a change of an instance's usage changes, by account and field."""
    by_storage: Counter[str] = Counter()
    for place, size in difference.items():
        by_storage[place.storage] += size
    own = {_place_field(place): size for place, size in difference.items()}
    field = _group_field(group_name)
    return {
        group_account(group_name): {**own, keys_field(uid): keys},
        **{storage_account(storage): {field: size} for storage, size in by_storage.items()},
        OVERALL: {field: sum(by_storage.values())},
    }


def bookings(reservation: Reservation, max_key_count: int) -> list[Booking]:
    """Return what a reservation reserves, in the order in which every manager does."""
    limits, wanted = reservation.limits, reservation.wanted_bytes
    field = _group_field(limits.group.name)
    made = [_group_booking(reservation, max_key_count)]
    by_storage: Counter[str] = Counter()
    for place, size in wanted.items():
        by_storage[place.storage] += size
    for storage in sorted(by_storage.keys() & limits.storages.keys()):
        size, limit = by_storage[storage], limits.storages[storage]
        floors = {_group_field(name): kept for name, kept in limit.kept_from(limits.group.name).items()}
        total = TotalLimit("b", floors, size, limit.capacity_bytes)
        made.append((storage_account(storage), [Demand(field, size)], [total]))
    if limits.shared is not None:
        size, quota = sum(wanted.values()), limits.shared.quota
        groups = {_group_field(name): 0 for name in limits.shared.group_names}
        made.append((OVERALL, [Demand(field, size)], [TotalLimit("", groups, size, quota.capacity_bytes)]))
    return made


def _group_booking(reservation: Reservation, max_key_count: int) -> Booking:
    quota, wanted = reservation.limits.group.quota, reservation.wanted_bytes
    by_type: Counter[StorageType] = Counter()
    for place, size in wanted.items():
        by_type[place.storage_type] += size
    totals = [TotalLimit("b", {}, sum(wanted.values()), quota.capacity)]
    totals += [
        TotalLimit(_type_prefix(storage_type), {}, size, max(0, limit))
        for storage_type, size in by_type.items()
        if (limit := quota.capacity_of(storage_type)) is not None
    ]
    demands = [Demand(_place_field(place), size) for place, size in wanted.items()]
    if max_key_count < MOST_KEYS:
        field = keys_field(reservation.uid)
        demands.append(Demand(field, reservation.new_keys))
        totals.append(TotalLimit("", {field: 0}, reservation.new_keys, max_key_count))
    return group_account(reservation.limits.group.name), demands, totals


async def counted(census: Census) -> dict[str, dict[str, int]]:
    """Return what indexes use, as their stores count it, by account and field."""
    accounts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for group_name, indexes in census.items():
        for uid, index in indexes.items():
            await index.refresh()
            changes = fields_by_account(group_name, uid, index.usage_bytes, index.key_count)
            for account, fields in changes.items():
                accounts[account].update(fields)
    return {account: dict(fields) for account, fields in accounts.items()}
