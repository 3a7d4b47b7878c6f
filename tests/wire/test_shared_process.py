"""Beside an engine: other copies of the same protobuf names in one process must not break the import."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

OURS = """
from vllm_cp import _wire
assert _wire.server_info(bytes.fromhex("3805")).total_kv_blocks == 5
assert _wire.health_status(bytes.fromhex("0801")).value == "SERVING"
"""
HEALTH = """
from grpc_health.v1 import health_pb2
assert health_pb2.HealthCheckResponse(status=1).SerializeToString() == bytes.fromhex("0801")
"""
# Another description of the same names: file control.proto, package vllm, other contents.
DUMMY = """
from google.protobuf import descriptor_pb2, descriptor_pool
for name in ("control.proto", "health.proto", "inference.proto"):
    file = descriptor_pb2.FileDescriptorProto(name=name, package="vllm", syntax="proto3")
    message = file.message_type.add(name={"control.proto": "ServerInfo"}.get(name, name.partition(".")[0]))
    message.field.add(name="other", number=1, type=5, label=1)
    if name == "control.proto":
        service = file.service.add(name="Control")
        service.method.add(name="GetServerInfo", input_type=".vllm.ServerInfo", output_type=".vllm.ServerInfo")
    descriptor_pool.Default().Add(file)
found = descriptor_pool.Default().FindMessageTypeByName("vllm.ServerInfo")
assert [field.name for field in found.fields] == ["other"]
"""
PARTS = {"ours": OURS, "health": HEALTH, "dummy": DUMMY}


@pytest.mark.parametrize("order", list(itertools.permutations(PARTS)), ids="-".join)
def test_other_copies_can_share_the_process(order: tuple[str, ...]) -> None:
    """Our generated code, the official health package and a foreign control.proto import in any order, warnings off."""
    script = "\n".join(PARTS[part] for part in order)
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_we_register_under_our_own_names_alone() -> None:
    """In protobuf's process-wide pool all that is ours is in package vllm_cp.wire, in files of our own path."""
    from vllm_cp._proto import control_pb2, health_pb2, inference_pb2

    for module in (control_pb2, health_pb2, inference_pb2):
        assert module.DESCRIPTOR.package == "vllm_cp.wire"
        assert module.DESCRIPTOR.name.startswith("vllm_cp/_proto/")
