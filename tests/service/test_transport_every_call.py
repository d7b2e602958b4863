"""Rules that hold for every call on every transport; the calls and their cases stand in the two tables."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import test_access_cases
import test_admin_cases
import test_capacity_cases
import test_config_cases
import test_event_report_cases
import test_insight_cases
import test_meta_cases
import test_pin_cases
import test_pool_cases
import test_residency_cases
import test_storage_cases
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from test_meta_cases import Fields, Refused
from test_transport_drivers import SERVICES, Api
from test_transport_sites import Site, unique

_TABLES = [
    *(test_meta_cases, test_pin_cases, test_pool_cases, test_admin_cases, test_capacity_cases, test_storage_cases),
    *(test_config_cases, test_access_cases, test_insight_cases, test_residency_cases),
    test_event_report_cases,
]
GOOD = {rpc: make for table in _TABLES for rpc, make in table.GOOD.items()}
REFUSED = {rpc: cases for table in _TABLES for rpc, cases in table.REFUSED.items()}
EVERY_RPC = [f"{name}.{method.name}" for name, service in SERVICES.items() for method in service.methods]


_REFUSALS = [pytest.param(rpc, case, id=f"{rpc}: {case.rule}") for rpc, cases in REFUSED.items() for case in cases]


def test_every_rpc_of_the_contract_has_cases() -> None:
    assert set(GOOD) == set(EVERY_RPC)
    assert set(REFUSED) == set(EVERY_RPC)


@pytest.mark.parametrize("rpc", GOOD)
def test_a_good_request_is_answered_with_ok_and_its_request_id(each_api: Api, rpc: str) -> None:
    site = Site(each_api)
    fields: Fields = GOOD[rpc](site)
    trace = unique("trace-ü")
    before = time.time_ns() // 1000
    answer = site.api.ok(rpc, trace_id=trace, **fields)
    after = time.time_ns() // 1000
    found = re.fullmatch(f"{trace}_([0-9]+)", answer.header.request_id)
    assert found, answer.header
    assert before <= int(found[1]) <= after


@pytest.mark.parametrize(("rpc", "case"), _REFUSALS)
def test_a_refusal_has_its_code_and_its_reason(site: Site, rpc: str, case: Refused) -> None:
    code, message = site.api.refused(rpc, trace_id="t", **case.fields(site))
    assert code == case.code, message
    assert [text for text in case.texts if text not in message] == [], message
    assert len(message) < 1000


@pytest.mark.parametrize("rpc", EVERY_RPC)
def test_an_unparsable_request_is_refused_by_every_call_and_the_connection_goes_on(each_api: Api, rpc: str) -> None:
    service, _, name = rpc.partition(".")
    assert each_api.driver.refuses_unparsable(service, name)
    assert each_api.call("AdminService.CheckHealth").is_health


@pytest.mark.parametrize("rpc", EVERY_RPC)
def test_a_text_that_is_too_long_is_not_sent_back(each_api: Api, rpc: str) -> None:
    service, _, name = rpc.partition(".")
    for fields in _long_texts(SERVICES[service].methods_by_name[name].input_type):
        assert each_api.call(rpc, **fields).ByteSize() < 2000


def _long_texts(descriptor: Descriptor, depth: int = 0) -> Iterator[Fields]:
    """Yield the fields of requests with one text each that is longer than any may be."""
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            values: Iterator[Any] = iter(["x" * 200_000])
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from ({field.name: value} for value in ({"x" * 200_000: "x"}, {"x": "x" * 200_000}))
            continue
        elif field.message_type is not None and depth < 4:
            values = _long_texts(field.message_type, depth + 1)
        else:
            continue
        yield from ({field.name: [value] if field.is_repeated else value} for value in values)


def test_the_header_of_a_refusal_has_a_request_id_too(each_api: Api) -> None:
    answer = each_api.call("GetInstanceInfo", trace_id="t", instance_id="nobody")
    assert re.fullmatch("t_[0-9]{16}", answer.header.request_id)
    assert not answer.HasField("instance_info")


def test_the_request_id_of_a_request_without_trace_id_is_the_time_alone(api: Api) -> None:
    assert re.fullmatch("_[0-9]{16}", api.ok("AdminService.CheckHealth").header.request_id)


def test_the_timing_tree_is_given_only_to_a_trace_id_that_asks_for_it(site: Site) -> None:
    fields = {"instance_id": site.instance(), "block_keys": [1], "query_type": "QT_PREFIX_MATCH"}
    assert site.api.ok("GetCacheLocation", trace_id="t", **fields).header.tracer_result == ""
    asked = site.api.ok("GetCacheLocation", trace_id="t__kvcm_need_span_tracer", **fields).header.tracer_result
    assert '"span_time_us"' in asked


def test_both_transports_serve_the_same_state(apis: dict[str, Api]) -> None:
    over_grpc, over_http = Site(apis["grpc"]), Site(apis["http"])
    instance = over_grpc.instance()
    written = over_http.write(instance, [-1, 2**63 - 1, -(2**63)])
    assert over_grpc.match(instance, [-1, 2**63 - 1, -(2**63)]) == written
    assert over_http.match(instance, [-1, 2**63 - 1, -(2**63)]) == written
