"""What grpcurl does: list every service through reflection and call it without any file of ours."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.servers.suite import Suite

CALLS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "preprocess": ("sluice.v1.Preprocess", "Tokenize", {"model": "tekken", "text": {"text": "a b"}}, "tokenIds"),
    "router": ("sluice.v1.Router", "ListWorkers", {"model": "tekken"}, "workers"),
    "postprocess": ("sluice.v1.Postprocess", "Parse", {"options": {"model": "tekken"}, "tokenIds": "YQQAAA=="}, "text"),
    "worker": ("sluice.v1.Worker", "GetInfo", {}, "card"),
}


@pytest.mark.parametrize("service", CALLS)
def test_list_and_call(suite: Suite, service: str) -> None:
    name, method, request, expected = CALLS[service]
    with grpc.insecure_channel(suite.address(service)) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {name, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        described = pool.FindServiceByName(name)
        assert all(one.input_type.full_name.startswith("sluice.v1.") for one in described.methods)
        found = described.FindMethodByName(method)
        ask = GetMessageClass(found.input_type)
        answer = GetMessageClass(found.output_type)
        call = channel.unary_unary(
            f"/{name}/{method}", request_serializer=ask.SerializeToString, response_deserializer=answer.FromString
        )
        told = MessageToDict(call(ParseDict(request, ask()), timeout=20))
    assert told[expected]
