"""The HTTP servers of the workers: by URL, by the hosts of the targets, or as discovery knows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from vllm_cp.cli import _context

if TYPE_CHECKING:
    from vllm_cp.config import Connection
    from vllm_cp.faults import HttpConnection

__all__ = ["HOST", "check_library", "connection_to", "http_url_option", "servers", "url_of"]

#: Stands for the host of a target.
HOST = "{host}"


def http_url_option(text: str) -> click.Option:
    """``--http-url``, repeatable."""
    return click.Option(["--http-url", "http_urls"], metavar="URL", multiple=True, help=text)


def servers(http_urls: Sequence[str], *, at_most_s: float | None = None) -> dict[str, HttpConnection]:
    """The servers to ask, by what they are called: URLs by themselves, workers by their names.

    Raises UsageError where a worker's server is not known, LocalError when discovery fails.
    """
    if http_urls and not any(HOST in url for url in http_urls):
        # The URLs name the servers already; connection flags say how they are reached.
        shared = _context.defaults(at_most_s=at_most_s)
        made = [connection_to(url, shared) for url in http_urls]
        return {server.base: server for server in made}
    if len(http_urls) > 1:
        raise click.UsageError(f"--http-url: give one URL with {HOST} in it, or the URL of each server")
    found = {}
    for connection in _context.connections(at_most_s=at_most_s):
        url = url_of(connection, http_urls[0] if http_urls else None)
        name = _context.name_of(connection)
        if url is None:
            raise click.UsageError(
                f"the HTTP server of {name} is not known: give --http-url http://{HOST}:8000,"
                " or name it where the worker is discovered"
            )
        found[name] = connection_to(url, connection)
    return found


def url_of(connection: Connection, template: str | None) -> str | None:
    """The base URL of a worker's server: by the template, else as discovery says. Raises UsageError."""
    if template is None:
        known: str | None = getattr(connection, "http_url", None)
        return known
    host = connection.address.host
    if HOST in template and host is None:
        raise click.UsageError(f"--http-url: {connection.address.name} has no host to put in for {HOST}")
    return template.replace(HOST, f"[{host}]" if host and ":" in host else host or "")


def check_library(servers: Iterable[HttpConnection]) -> None:
    """Raises UsageError where there are servers to ask and nothing to ask them with."""
    from vllm_cp.errors import ConfigError
    from vllm_cp.faults import FaultTolerance

    for server in servers:
        try:
            FaultTolerance(server).close()
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        return


def connection_to(url: str, shared: Connection, source: str = "--http-url") -> HttpConnection:
    """How a server is reached, as far as the connection flags say. Raises UsageError."""
    from vllm_cp.errors import ConfigError
    from vllm_cp.faults import HttpConnection

    secure = url.lower().startswith("https:")
    # A token that may cross TLS only does not go to a server in plaintext; nor is it wanted there as a rule.
    sends = shared.token_file is not None and (secure or shared.insecure_token)
    try:
        return HttpConnection(
            url=url,
            tls=shared.tls if secure else None,
            token_file=shared.token_file if sends else None,
            insecure_token=shared.insecure_token,
            timeout_s=shared.timeout_s,
            proxy=shared.proxy,
            server_name=shared.server_name if secure else None,
        )
    except ConfigError as error:
        raise click.UsageError(f"{source}: {error}") from None
