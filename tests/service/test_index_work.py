"""How much work the calls behind the index API make of the instances of a deployment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_clock import FakeClock

from kvcm.model.errors import InvalidArgumentError, UnknownInstanceError
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.residency.residency import InstanceResidency, Residency
from kvcm.service.index_api import IndexApi
from kvcm.service.request_limits import RequestLimits

GROUPS = ("g0", "g1", "g2")


class Listing:
    """Instances that count how often they are listed.

    Args:
        instances: all of them.
    """

    def __init__(self, instances: list[Instance]) -> None:
        self.instances = instances
        self.listings = 0

    def all(self, group: str = "") -> list[Instance]:
        """Return the instances of a group, of all for ""."""
        self.listings += 1
        return [each for each in self.instances if group in {"", each.instance_group_name}]


class Viewed(Residency):
    """Counts the instances that are viewed."""

    views = 0

    def view(self, instance: Instance) -> InstanceResidency:
        """See Residency."""
        self.views += 1
        return super().view(instance)


class Rig:
    """The calls over some instances.

    Args:
        instances: all of them.
    """

    def __init__(self, instances: list[Instance]) -> None:
        self.listing = Listing(instances)
        by_id = {each.instance_id: each for each in instances}
        self.residency = Viewed(FakeClock(), by_id.get)
        groups = SimpleNamespace(find=lambda name: name if name in GROUPS else None)
        registry: Any = SimpleNamespace(instances=self.listing, groups=groups)
        nothing: Any = None
        limits = RequestLimits(1000, 1000, 1 << 20)
        self.api = IndexApi(nothing, registry, self.residency, nothing, limits, run_id="run", manager="127.0.0.1:6381")


def instance(number: int, group: str = "g0", model: str = "m", block_size: int = 16, lora: str = "") -> Instance:
    """Return an instance."""
    deployment = ModelDeployment(model_name=model, lora_name=lora)
    return Instance("", group, f"i{number}", block_size, (LocationSpecInfo("kv", 10),), deployment)


async def test_instances_are_listed_once_for_all_publishers() -> None:
    instances = [instance(number, f"g{number % 2}", f"m{number // 2}") for number in range(40)]
    instances += [
        instance(100, "g0", "m0", lora="l"),
        instance(101, "g0", "m0", block_size=32),
        instance(102, "g1", "m1"),
    ]
    rig = Rig(instances)
    groups = ("g0", "g1", "g2", "")
    for at, group in enumerate(groups):
        for number in range(25):
            model = f"m{number % 20}" if number < 22 else f"i{number}"
            publisher = pb.Publisher(
                engine=f"e{number}", model_name=model, block_size=16, endpoint=f"tcp://10.0.{at}.{number}:1"
            )
            await rig.api.register(pb.RegisterPublisherRequest(instance_group=group, publisher=publisher))
    rig.listing.listings = 0
    answer: Any = (await rig.api.describe(pb.DescribeIndexRequest())).message
    assert len(answer.publishers) == 100
    assert rig.listing.listings == 2, "one for publishers, one for contexts"
    for each in answer.publishers:
        fitting = [
            found.instance_id
            for found in instances
            if each.instance_group in {"", found.instance_group_name}
            and each.model_name in {found.instance_id, found.model_deployment.model_name}
            and (found.model_deployment.lora_name, found.block_size) == ("", 16)
        ]
        assert each.instance_id == (fitting[0] if len(fitting) == 1 else ""), (each, fitting)
        assert bool(each.problem) == (len(fitting) != 1)


async def test_too_many_instances_are_refused_before_anything_is_made_of_them() -> None:
    rig = Rig([instance(number) for number in range(65)])
    with pytest.raises(InvalidArgumentError, match="65 instances are of model 'm'"):
        await rig.api.match_model(pb.MatchModelRequest(model_name="m", token_ids=[1]))
    assert rig.residency.views == 0
    with pytest.raises(UnknownInstanceError):
        await rig.api.match_model(pb.MatchModelRequest(model_name="m", token_ids=[1], block_size=32))
    assert rig.residency.views == 0
    assert (await rig.api.match_model(pb.MatchModelRequest(model_name="i7", token_ids=[1]))).message is not None
    assert rig.residency.views == 1
