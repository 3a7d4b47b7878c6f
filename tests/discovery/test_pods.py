"""What a pod says about its worker."""

from __future__ import annotations

from typing import Any

import pytest

from tests.discovery.apiserver import pod
from vllm_cp.discovery import DiscoveredTarget, Overrides
from vllm_cp.discovery._pods import PodReader


def read(one: dict[str, Any], **options: Any) -> DiscoveredTarget:
    found = PodReader(**options).target(one)
    assert found is not None
    return found


def test_a_pod_is_known_by_namespace_and_name() -> None:
    """Never by its address, which will be another pod's tomorrow."""
    found = read(pod("llama-0", ip="10.0.0.7", labels={"model": "llama"}), pool_label="model")
    assert (found.key, found.target, found.pool) == ("ml/llama-0", "10.0.0.7:9000", "llama")
    assert (found.namespace, found.pod, found.node, found.deleted) == ("ml", "llama-0", "gpu-1", False)
    assert found.labels["app"] == "vllm"


def test_the_port_is_told_by_annotation_before_the_named_port() -> None:
    """Two pods of a hostNetwork node can't share a port, so the annotation has the last word."""
    assert read(pod("a", annotations={"vllm-cp.io/grpc-port": "8123"})).target == "127.0.0.2:8123"
    assert read(pod("a", port=None, annotations={"vllm-cp.io/grpc-port": "8123"})).target == "127.0.0.2:8123"


def test_a_port_is_never_guessed() -> None:
    """A pod that doesn't tell its port is there, and says what to give it; not even 8001 is tried."""
    found = read(pod("a", ports=[{"name": "grpc", "containerPort": 8001}]))
    assert found.target is None
    assert "no annotation vllm-cp.io/grpc-port and no container port named grpc-control" in found.problem


@pytest.mark.parametrize("text", ["0", "65536", "grpc", "", "\uff18\uff10\uff10\uff11"])
def test_an_annotation_that_is_no_port_is_told(text: str) -> None:
    """It isn't passed over in favour of the named port, which somebody wanted to override."""
    assert "a port is a number" in read(pod("a", annotations={"vllm-cp.io/grpc-port": text})).problem


def test_several_ports_of_that_name_need_an_annotation() -> None:
    """Two containers with one name for different ports: nobody can know which."""
    two = [{"name": c, "ports": [{"name": "grpc-control", "containerPort": n}]} for c, n in (("a", 1), ("b", 2))]
    assert "ports 1, 2 are all named grpc-control" in read(pod("a", containers=two)).problem


def test_a_native_sidecar_may_have_the_port() -> None:
    """An init container that goes on running counts, one that ends does not."""
    ports = [{"name": "grpc-control", "containerPort": 7}]
    sidecar = {"name": "s", "restartPolicy": "Always", "ports": ports}
    assert read(pod("a", port=None, initContainers=[sidecar])).target == "127.0.0.2:7"
    assert read(pod("a", port=None, initContainers=[{"name": "s", "ports": ports}])).target is None


def test_the_http_port_is_that_beside_the_control_port() -> None:
    """A port named http in another container may be anybody's."""
    both = [{"name": "grpc-control", "containerPort": 9}, {"name": "http", "containerPort": 80}]
    assert read(pod("a", ports=both)).http_url == "http://127.0.0.2:80"
    assert read(pod("a", ports=both), http_scheme="https").http_url == "https://127.0.0.2:80"
    apart = [{"name": "v", "ports": both[:1]}, {"name": "proxy", "ports": both[1:]}]
    assert read(pod("a", containers=apart)).http_url is None
    assert read(pod("a", containers=apart, annotations={"vllm-cp.io/http-port": "81"})).http_url == (
        "http://127.0.0.2:81"
    )


def test_ipv6_pods() -> None:
    """Addresses come in brackets, in both places."""
    found = read(pod("a", ip="fd00::5", annotations={"vllm-cp.io/http-port": "80"}))
    assert (found.target, found.http_url) == ("[fd00::5]:9000", "http://[fd00::5]:80")


def test_a_pod_that_waits_for_a_node_is_there() -> None:
    """A worker that never comes up is just what one wants to see."""
    found = read(pod("a", ip=None, phase="Pending"))
    assert found.problem == "the pod has no address yet (phase Pending)"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_is_over_is_no_worker(phase: str) -> None:
    """Evicted pods stay in the list for days."""
    assert PodReader().target(pod("a", phase=phase)) is None


def test_only_leaders_of_a_leader_worker_set_are_workers() -> None:
    """The others run engines without a frontend."""
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    assert PodReader().target(pod("a", labels={index: "0"})) is not None
    assert PodReader().target(pod("a", labels={index: "1"})) is None


def test_a_pod_may_choose_its_canary_and_nothing_else() -> None:
    """Whoever may annotate a pod must not choose which files we read and where tokens go."""
    notes = {"vllm-cp.io/canary": "On", "vllm-cp.io/token-file": "/etc/shadow"}
    assert read(pod("a", annotations=notes)).overrides == Overrides(canary=True)
    base = Overrides(canary=True)
    assert read(pod("a", annotations={"vllm-cp.io/canary": "off"}), overrides=base).overrides == Overrides(canary=False)
    assert read(pod("a", annotations={"vllm-cp.io/canary": "?"}), overrides=base).overrides == base


def test_a_pod_without_the_pool_label_is_in_the_default_pool() -> None:
    """Unlabelled is not a pool of its own."""
    assert read(pod("a"), pool_label="model").pool == "default"
    assert read(pod("a"), pool="chat").pool == "chat"


def test_a_pod_with_nothing_optional_in_it() -> None:
    """The API leaves out what is empty."""
    bare = {"metadata": {"name": "a", "namespace": "ml"}, "spec": {"containers": [{"name": "x"}]}}
    assert "no annotation" in read(bare).problem
