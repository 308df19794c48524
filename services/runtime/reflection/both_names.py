"""gRPC reflection under both of its names: `grpc.reflection.v1`, and the older `v1alpha` with the same messages.

grpcio-reflection has v1alpha only. Newer clients ask for v1 alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_NEW_FILE = "grpc/reflection/v1/reflection.proto"
V1_NAME = f"{_NEW}.ServerReflection"


def add_reflection(server: grpc.aio.Server, names: Iterable[str]) -> None:
    """Serve reflection for the services `names` and for itself."""
    describe_v1()
    every = (*names, reflection.SERVICE_NAME, V1_NAME)
    reflection.enable_server_reflection(every, server)
    servicer = ReflectionServicer(every)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(V1_NAME, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((generic,))


def describe_v1() -> None:
    """Put a description of v1 into the default pool, from which reflection answers. It is the description of v1alpha
    with the package name of v1. Does nothing if the pool has it."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_NEW_FILE)
    except KeyError:
        described = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(described)
        described.ClearField("options")  # names of packages in other languages
        described.name, described.package = _NEW_FILE, _NEW
        for message in described.message_type:
            for field in message.field:
                if field.type_name:
                    field.type_name = field.type_name.replace(_OLD, _NEW)
        for service in described.service:
            for method in service.method:
                method.input_type = method.input_type.replace(_OLD, _NEW)
                method.output_type = method.output_type.replace(_OLD, _NEW)
        pool.Add(described)
