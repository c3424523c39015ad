"""A stand-in for grpcurl, as far as the pages use it: lists services and calls unary methods, all by reflection.

grpcurl [-plaintext] ADDRESS list [SERVICE]
grpcurl [-plaintext] [-d JSON] ADDRESS SERVICE/METHOD
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

TIMEOUT_S = 30


def main(arguments: Sequence[str]) -> int:
    """Runs a command; the exit code is 1 when the server refuses it, 2 when the command cannot be."""
    data, rest = "{}", list(arguments)
    if "-plaintext" not in rest:
        print("this stand-in speaks plain text only: give -plaintext", file=sys.stderr)
        return 2
    rest.remove("-plaintext")
    if "-d" in rest:
        at = rest.index("-d")
        data = rest[at + 1]
        del rest[at : at + 2]
    address, *what = rest
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        try:
            if what[0] == "list":
                _list(database, what[1:])
            else:
                _call(channel, database, what[0], data)
        except grpc.RpcError as error:
            print(f"ERROR:\n  Code: {error.code().name}\n  Message: {error.details()}", file=sys.stderr)
            return 1
    return 0


def _list(database: ProtoReflectionDescriptorDatabase, services: Sequence[str]) -> None:
    pool = descriptor_pool.DescriptorPool(database)
    if not services:
        print(*sorted(database.get_services()), sep="\n")
    for service in services:
        print(*(f"{service}.{method.name}" for method in pool.FindServiceByName(service).methods), sep="\n")


def _call(channel: grpc.Channel, database: ProtoReflectionDescriptorDatabase, path: str, data: str) -> None:
    service, _, name = path.rpartition("/")
    method = descriptor_pool.DescriptorPool(database).FindServiceByName(service).methods_by_name[name]
    asked = message_factory.GetMessageClass(method.input_type)
    answered = message_factory.GetMessageClass(method.output_type)
    call = channel.unary_unary(f"/{service}/{name}", asked.SerializeToString, answered.FromString)
    print(json_format.MessageToJson(call(json_format.Parse(data, asked()), timeout=TIMEOUT_S)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
