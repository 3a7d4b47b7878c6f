"""Targets from a fake API server that speaks real list and watch HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.discovery.apiserver import ApiServer, pod
from tests.discovery.following import Following, until
from vllm_cp.discovery import KubernetesDiscoverer


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy and no cluster of the machine's own."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def kubeconfig(api: ApiServer, tmp_path: Path) -> Path:
    return api.kubeconfig(tmp_path / "config")


def pods(kubeconfig: Path, **options: Any) -> KubernetesDiscoverer:
    settings = {"namespace": "ml", "kubeconfig": kubeconfig, "retry_s": (0.01, 0.05), **options}
    return KubernetesDiscoverer(**settings)


async def test_pods_are_listed_and_then_watched(api: ApiServer, kubeconfig: Path) -> None:
    """What is there comes at once; what changes comes as it changes, without another list."""
    api.put(pod("a"), pod("b", ip=None, phase="Pending"))
    source = pods(kubeconfig)
    async with Following(source) as seen:
        await seen.count(1)
        assert seen.keys == ["ml/a", "ml/b"]
        await until(lambda: api.watching == 1)
        api.put(pod("b", ip="127.0.0.3"))
        await seen.count(2)
        assert seen.targets["ml/b"].target == "127.0.0.3:9000"
        api.delete("a")
        await seen.count(3)
        assert seen.keys == ["ml/b"]
    assert api.verbs() == ["list", "watch"]
    assert source.status.error is None
    await until(lambda: api.watching == 0, "the end of the watch")


async def test_a_deletion_shows_before_the_pod_is_gone(api: ApiServer, kubeconfig: Path) -> None:
    """The stamp tells a planned stop from a death."""
    api.put(pod("a"))
    async with Following(pods(kubeconfig)) as seen:
        await seen.count(1)
        await until(lambda: api.watching == 1)
        api.mark_deleted("a")
        await seen.count(2)
        assert seen.targets["ml/a"].deleted
        api.delete("a")
        await seen.count(3)
        assert seen.keys == []


async def test_a_pod_of_the_same_name_under_a_new_address_is_the_same_worker(api: ApiServer, kubeconfig: Path) -> None:
    """A StatefulSet's pod comes back under its own name."""
    api.put(pod("a"))
    async with Following(pods(kubeconfig)) as seen:
        await seen.count(1)
        await until(lambda: api.watching == 1)
        api.delete("a")
        api.put(pod("a", ip="127.0.0.3"))
        await seen.until(lambda targets: bool(targets.targets) and targets.targets[0].target == "127.0.0.3:9000")
        assert seen.keys == ["ml/a"]


async def test_what_selects_the_pods(api: ApiServer, kubeconfig: Path) -> None:
    """By label, by namespace or in all of them, and on one node only for a DaemonSet; pools by a label of choice."""
    api.put(
        pod("a", labels={"model": "llama"}),
        pod("b", labels={"app": "other"}),
        pod("c", namespace="lab"),
        pod("d", node="gpu-2"),
    )
    selections: list[tuple[dict[str, Any], list[str]]] = [
        ({"label_selector": "app=vllm"}, ["ml/a", "ml/d"]),
        ({"namespace": None}, ["ml/a", "ml/b", "lab/c", "ml/d"]),
        ({"namespace": None, "node": "gpu-2"}, ["ml/d"]),
        ({"label_selector": "app=vllm", "node": "gpu-1"}, ["ml/a"]),
    ]
    for options, keys in selections:
        async with Following(pods(kubeconfig, pool_label="model", **options)) as seen:
            await seen.count(1)
            assert seen.keys == keys
            if "ml/a" in keys:
                assert seen.targets["ml/a"].pool == "llama"


async def test_a_long_list_comes_in_pages(api: ApiServer, kubeconfig: Path) -> None:
    """A thousand pods are not one answer."""
    api.page = 7
    api.put(*(pod(f"a-{number}") for number in range(40)))
    async with Following(pods(kubeconfig)) as seen:
        await seen.count(1)
        assert len(seen.keys) == 40
    assert api.verbs().count("list") == 6


async def test_changes_of_no_interest_are_no_news(api: ApiServer, kubeconfig: Path) -> None:
    """Pods change their status all the time."""
    api.put(pod("a"))
    async with Following(pods(kubeconfig)) as seen:
        await seen.count(1)
        await until(lambda: api.watching == 1)
        api.put({**pod("a"), "status": {"phase": "Running", "podIP": "127.0.0.2", "conditions": [{"type": "Ready"}]}})
        api.bookmark()
        api.put(pod("b"))
        await seen.until(lambda targets: len(targets.targets) == 2)
        assert len(seen.sets) == 2


async def test_a_watch_that_ends_goes_on_where_it_was(api: ApiServer, kubeconfig: Path) -> None:
    """The server ends each watch after its time; the next one begins at the last version, bookmarks included."""
    api.put(pod("a"))
    async with Following(pods(kubeconfig, watch_s=1.0)) as seen:
        await seen.count(1)
        await until(lambda: api.watching == 1)
        api.say("ADDED", pod("elsewhere", namespace="lab"))  # moves the version, unseen by this watch
        api.bookmark()
        await until(lambda: api.verbs().count("watch") == 2)
        assert api.requests[-1]["resourceVersion"] == str(int(api.requests[1]["resourceVersion"]) + 1)
        api.put(pod("b"))
        await seen.count(2)
    assert api.verbs().count("list") == 1


async def test_a_cut_connection_loses_nothing(api: ApiServer, kubeconfig: Path) -> None:
    """What happened meanwhile is made up for by the next watch, and a short cut is no error."""
    api.put(pod("a"))
    source = pods(kubeconfig)
    async with Following(source) as seen:
        await seen.count(1)
        await until(lambda: api.watching == 1)
        assert api.cut() == 1
        api.put(pod("b"))
        api.delete("a")
        await seen.until(lambda targets: [target.key for target in targets.targets] == ["ml/b"])
        assert source.status.error is None
    assert api.verbs().count("list") == 1


@pytest.mark.parametrize("how", ["event", "status"])
async def test_a_version_that_expired_means_a_new_list(api: ApiServer, kubeconfig: Path, how: str) -> None:
    """410, as an event in the stream or as the answer to the watch: list again, and miss nothing."""
    api.put(pod("a"))
    source = pods(kubeconfig)
    async with Following(source) as seen:
        await seen.count(1)
        await until(lambda: api.watching == 1)
        if how == "status":
            api.refuse["watch"] = 410
        api.put(pod("b"))
        api.delete("a")
        api.compact()
        api.cut()
        await seen.until(lambda targets: [target.key for target in targets.targets] == ["ml/b"])
        api.refuse.clear()
        await until(lambda: api.watching == 1)
        api.put(pod("c"))
        await seen.until(lambda targets: len(targets.targets) == 2)
        assert source.status.error is None


async def test_a_list_that_expires_between_pages_begins_anew(api: ApiServer, kubeconfig: Path) -> None:
    """A page's token may be too old when the next one is asked for."""
    api.page = 1
    api.put(pod("a"), pod("b"))
    api.refuse["list"] = 410
    async with Following(pods(kubeconfig)) as seen:
        await until(lambda: api.verbs().count("list") == 3)
        api.refuse.clear()
        await seen.count(1)
        assert seen.keys == ["ml/a", "ml/b"]


@pytest.mark.parametrize(
    ("namespace", "role"), [("ml", "a Role and RoleBinding"), (None, "a ClusterRole and ClusterRoleBinding")]
)
async def test_denied_by_rbac(api: ApiServer, kubeconfig: Path, namespace: str | None, role: str) -> None:
    """403 says which verb is missing and what to grant, and heals by itself when it is granted."""
    api.put(pod("a"))
    api.refuse["list"] = 403
    source = pods(kubeconfig, namespace=namespace)
    async with Following(source) as seen:
        error = await seen.until_error("not allowed to list pods")
        assert f"grant the verbs list and watch by {role} (HTTP 403: scripted 403)" in error
        assert (f"namespace {namespace}" if namespace else "all namespaces") in error
        assert source.status.last_success is None
        api.refuse = {"watch": 403}
        await seen.count(1)
        await seen.until_error("not allowed to watch pods")
        assert seen.keys == ["ml/a"]
        api.refuse.clear()
        await until(lambda: source.status.error is None)


async def test_a_token_that_is_not_accepted(api: ApiServer, kubeconfig: Path) -> None:
    """401 is told apart from 403; the credentials are loaded again, for they may have been renewed."""
    api.token = "renewed"
    api.put(pod("a"))
    async with Following(pods(kubeconfig)) as seen:
        await seen.until_error("does not accept our credentials: check the token (HTTP 401")
        api.kubeconfig(kubeconfig, token="renewed")
        await seen.count(1)
        assert seen.keys == ["ml/a"]


async def test_an_api_server_that_goes_away_takes_no_worker_with_it(api: ApiServer, kubeconfig: Path) -> None:
    """The last set goes on, the status says why, and everything is made up for when the server is back."""
    api.put(pod("a"))
    source = pods(kubeconfig)
    async with Following(source) as seen:
        await seen.count(1)
        await until(lambda: api.watching == 1)
        before = source.status.last_success
        await api.stop()
        await seen.until_error("API server out of reach")
        assert seen.keys == ["ml/a"]
        assert source.status.last_success == before
        api.put(pod("b"))
        await api.back()
        await seen.count(2)
        assert source.status.error is None


async def test_trouble_of_the_server_and_answers_that_are_none(api: ApiServer, kubeconfig: Path) -> None:
    """A server error is passed on, and so is an error event or a line that is no event; the workers stay."""
    api.put(pod("a"))
    api.refuse["list"] = 503
    source = pods(kubeconfig)
    async with Following(source) as seen:
        await seen.until_error("the API server cannot list pods in namespace ml (HTTP 503: scripted 503)")
        api.refuse.clear()
        await seen.count(1)
        await until(lambda: api.watching == 1)
        api.say("ERROR", {"metadata": {}, "code": 500, "message": "etcd is unwell"})
        await seen.until_error("etcd is unwell")
        assert seen.keys == ["ml/a"]


async def test_pauses_grow_while_it_does_not_work(api: ApiServer, kubeconfig: Path) -> None:
    """Doubled each time up to a bound, with jitter, so that a thousand exporters don't beat on one server."""
    api.refuse["list"] = 500
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 7:
            await asyncio.Event().wait()

    source = pods(kubeconfig, retry_s=(1.0, 30.0), sleep=sleep, jitter=lambda: 1.0)
    async with Following(source):
        await until(lambda: len(naps) == 7)
    assert naps == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


async def test_a_proxy_in_the_way_is_named(api: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes clients honour proxy variables, so a failure says which are in force."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with Following(pods(kubeconfig)) as seen:
        assert "a proxy is in force (http_proxy)" in await seen.until_error("API server out of reach")


async def test_no_way_to_a_server(tmp_path: Path) -> None:
    """A missing kubeconfig is trouble that may pass, as when a secret is mounted later."""
    async with Following(pods(tmp_path / "gone")) as seen:
        await seen.until_error("no way to reach an API server")
