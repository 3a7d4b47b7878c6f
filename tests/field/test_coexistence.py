"""Beside an engine, in one process: other people's generated code of the same names, in whatever order."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from vllm_cp.testing import FakeWorker

# Each part makes a call, so that what was imported is really used.
OURS = """
import vllm_cp_exporter.daemon
from vllm_cp import ControlClient
with ControlClient(target) as client:
    assert client.server_info().total_kv_blocks == 1024
    assert client.check().value == "SERVING"
"""
HEALTH = """
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(target) as channel:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
assert answer.status == health_pb2.HealthCheckResponse.SERVING
"""
# As generated from another control.proto: the same file name, package, message and service, with other contents.
DUMMY = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
file = descriptor_pb2.FileDescriptorProto(name="control.proto", package="vllm", syntax="proto3")
for name in ("GetServerInfoRequest", "ServerInfo"):
    message = file.message_type.add(name=name)
    message.field.add(name="blocks", number=6, type=4, label=1)
method = file.service.add(name="Control").method.add(name="GetServerInfo")
method.input_type, method.output_type = ".vllm.GetServerInfoRequest", ".vllm.ServerInfo"
pool = descriptor_pool.Default()
pool.Add(file)
asked, answered = (pool.FindMessageTypeByName(f"vllm.{name}") for name in ("GetServerInfoRequest", "ServerInfo"))
if hasattr(message_factory, "GetMessageClass"):
    Asked, Answered = map(message_factory.GetMessageClass, (asked, answered))
else:
    Asked, Answered = map(message_factory.MessageFactory().GetPrototype, (asked, answered))
with grpc.insecure_channel(target) as channel:
    call = channel.unary_unary("/vllm.Control/GetServerInfo", Asked.SerializeToString, Answered.FromString)
    assert isinstance(call(Asked(), timeout=5), Answered)
"""
PARTS = {"ours": OURS, "health": HEALTH, "dummy": DUMMY}


@pytest.mark.parametrize("order", list(itertools.permutations(PARTS)), ids="-".join)
def test_all_of_them_work(order: tuple[str, ...], fake: FakeWorker) -> None:
    """SDK and daemon, the official health package and a foreign control.proto all make their calls, warnings off."""
    script = "\n".join(["import sys, grpc", "target = sys.argv[1]", *(PARTS[part] for part in order)])
    # A dependency of the daemon may warn of its own; what concerns generated code may not.
    command = [sys.executable, "-W", "error:::google", "-W", "error::UserWarning", "-c", script, fake.target]
    quiet = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=quiet)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_start() -> None:
    """Both commands tell their version, whichever grpcio and protobuf of those allowed are installed."""
    for module in ("vllm_cp.cli", "vllm_cp_exporter"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", module, "--version"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("vllm-cp")
