"""gRPC server reflection for `serve --reflection`: `grpc.reflection.v1`, and `v1alpha` for clients that are older.

grpcio-reflection has v1alpha alone. The messages of v1 have the same fields, so one servicer answers both. The description of
v1 is that of v1alpha with the package's other name. Refuses nothing: the gate bounds these calls.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

SERVICE_V1 = "grpc.reflection.v1.ServerReflection"
_METHOD = "ServerReflectionInfo"
_ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"


def enable(names: tuple[str, ...], server: Any) -> None:
    """Describe the services `names`, and reflection itself, in both versions. `server`: a grpc.aio.Server."""
    servicer = aio.ReflectionServicer((*names, reflection.SERVICE_NAME, SERVICE_V1), pool=_Described())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for service in (reflection.SERVICE_NAME, SERVICE_V1):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {_METHOD: handler}),))


def file_of_v1() -> descriptor_pb2.FileDescriptorProto:
    """The description of v1."""
    found = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(found)
    found.name, found.package = "grpc/reflection/v1/reflection.proto", _V1
    found.ClearField("options")
    for message in found.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(f".{_ALPHA}.", f".{_V1}.")
    for method in found.service[0].method:
        method.input_type = method.input_type.replace(f".{_ALPHA}.", f".{_V1}.")
        method.output_type = method.output_type.replace(f".{_ALPHA}.", f".{_V1}.")
    return found


class _Described:
    """All descriptions of this program, and that of v1, which is in a pool of its own: a library may bring it one day."""

    def __init__(self) -> None:
        self._all, self._own = descriptor_pool.Default(), descriptor_pool.DescriptorPool()
        self._own.Add(file_of_v1())

    def FindFileByName(self, name: str) -> Any:  # noqa: N802 - protobuf's name
        try:
            return self._all.FindFileByName(name)
        except KeyError:
            return self._own.FindFileByName(name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 - protobuf's name
        try:
            return self._all.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._own.FindFileContainingSymbol(symbol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all, name)
