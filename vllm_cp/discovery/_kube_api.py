"""Listing and watching pods: the API server's HTTP, and what its answers mean."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ApiTrouble", "Event", "Expired", "PodApi"]

_PAGE = 250
_CONNECT_S, _READ_S = 10.0, 30.0
_PROXIES = ("https_proxy", "http_proxy", "all_proxy", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")


class ApiTrouble(Exception):
    """The API server did not do as asked. Says why and what to do."""

    def __init__(self, text: str, *, stale_login: bool = False) -> None:
        super().__init__(text)
        #: Loading the credentials again may help.
        self.stale_login = stale_login


class Expired(Exception):
    """The version to go on from is too old (410): list again."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a watch."""

    #: ADDED, MODIFIED, DELETED, BOOKMARK.
    kind: str
    pod: Mapping[str, Any]

    @property
    def version(self) -> str | None:
        """Where a later watch may go on."""
        version: str | None = (self.pod.get("metadata") or {}).get("resourceVersion")
        return version


class PodApi:
    """The pods of one selection."""

    def __init__(
        self,
        *,
        namespace: str | None,
        label_selector: str | None,
        field_selector: str | None,
        kubeconfig: Path | None,
        context: str | None,
    ) -> None:
        """``namespace=None`` is all. Raises ImportError when the extra is missing."""
        try:
            # Half a second of generated models: only for those who use it.
            import kubernetes_asyncio.client  # noqa: F401
        except ImportError:
            raise ImportError(
                "Kubernetes discovery needs kubernetes_asyncio: pip install 'vllm-cp[kubernetes]'",
                name="kubernetes_asyncio",
            ) from None
        self._namespace = namespace
        self._selectors = {"label_selector": label_selector, "field_selector": field_selector}
        self._kubeconfig = kubeconfig
        self._context = context
        self._client: Any = None

    async def close(self) -> None:
        """Close the connections. It opens new ones when it is used again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def every(self) -> tuple[list[Mapping[str, Any]], str]:
        """All pods, and the version that a watch goes on from. Raises ApiTrouble, Expired."""
        pods: list[Mapping[str, Any]] = []
        more: str | None = None
        while True:
            response = await self._get("list", limit=_PAGE, _continue=more)
            try:
                page = json.loads(await response.read())
            except _broken() as error:
                raise ApiTrouble(f"the list of pods broke off: {_said(error)}") from None
            except ValueError:
                raise ApiTrouble("the list of pods is no JSON: is this an API server?") from None
            finally:
                response.release()
            pods += page.get("items") or ()
            more = page["metadata"].get("continue")
            if not more:
                return pods, page["metadata"].get("resourceVersion") or ""

    async def watch(self, version: str, *, seconds: float) -> AsyncIterator[list[Event]]:
        """Events since ``version``, as many at a time as came together; for ``seconds`` or until it breaks.

        Raises ApiTrouble, Expired. An empty list is the first to come: the watch stands."""
        response = await self._get(
            "watch",
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=max(1, round(seconds)),
            # Bookmarks come about once a minute, and nothing else may come for the whole time.
            _request_timeout=_timeout(seconds + _READ_S),
        )
        try:
            yield []
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                events = [_event(line) for line in lines if line.strip()]
                if events:
                    yield events
        except _broken():
            return  # whoever asks again hears why
        finally:
            response.close()

    async def _get(self, verb: str, **query: Any) -> Any:
        query = {name: value for name, value in {**self._selectors, **query}.items() if value is not None}
        query = {"_preload_content": False, "_request_timeout": _timeout(_READ_S), **query}
        api = await self._api()
        try:
            if self._namespace is None:
                response = await api.list_pod_for_all_namespaces(**query)
            else:
                response = await api.list_namespaced_pod(self._namespace, **query)
            if response.status == 200:
                return response
            body = await response.read()
        except _broken() as error:
            raise ApiTrouble(f"API server out of reach: {_said(error)}{_proxy()}") from None
        response.release()
        raise self._refused(verb, response.status, _message(body))

    def _refused(self, verb: str, status: int, said: str) -> Exception:
        if status == 410:
            return Expired()
        where = "all namespaces" if self._namespace is None else f"namespace {self._namespace}"
        tail = f" (HTTP {status}{': ' + said if said else ''})"
        if status == 401:
            return ApiTrouble(
                f"the API server does not accept our credentials: check the token{tail}", stale_login=True
            )
        if status == 403:
            role = "a ClusterRole and ClusterRoleBinding" if self._namespace is None else "a Role and RoleBinding"
            return ApiTrouble(f"not allowed to {verb} pods in {where}: grant the verbs list and watch by {role}{tail}")
        return ApiTrouble(f"the API server cannot {verb} pods in {where}{tail}")

    async def _api(self) -> Any:
        from kubernetes_asyncio import client

        if self._client is None:
            self._client = client.ApiClient(await self._configuration())
        return client.CoreV1Api(self._client)

    async def _configuration(self) -> Any:
        from kubernetes_asyncio import client, config

        made = client.Configuration()
        try:
            if self._kubeconfig is None and self._context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=made)  # type: ignore[no-untyped-call]
            else:
                await config.load_kube_config(
                    config_file=None if self._kubeconfig is None else os.fspath(self._kubeconfig),
                    context=self._context,
                    client_configuration=made,
                    persist_config=False,
                )
        except (config.ConfigException, OSError, ValueError) as error:
            raise ApiTrouble(f"no way to reach an API server: {_said(error)}") from None
        return made


def _timeout(read_s: float) -> Any:
    """aiohttp's own form is the one that every version of the library passes on."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_connect=_CONNECT_S, sock_read=read_s)


def _event(line: bytes) -> Event:
    try:
        said = json.loads(line)
        kind, pod = said["type"], said["object"]
    except (ValueError, KeyError, TypeError):
        raise ApiTrouble(f"the watch brought a line that is no event: {line[:80]!r}") from None
    if kind == "ERROR":
        if pod.get("code") == 410:
            raise Expired
        raise ApiTrouble(f"the watch ended with an error: {pod.get('message') or pod}")
    return Event(kind, pod)


def _broken() -> tuple[type[Exception], ...]:
    import aiohttp

    return (aiohttp.ClientError, asyncio.TimeoutError, OSError)


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _message(body: bytes) -> str:
    """The message of a Status object, or the beginning of whatever else a proxy on the way may send."""
    try:
        said = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        said = body[:200].decode(errors="replace")
    return " ".join(str(said).split())


def _proxy() -> str:
    found = sorted({name for name in _PROXIES if os.environ.get(name)})
    return f"; a proxy is in force ({', '.join(found)}): set no_proxy if it is in the way" if found else ""
