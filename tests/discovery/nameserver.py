"""A small name server on loopback, UDP and TCP, that answers what a test tells it to."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import cast

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

_UDP_LIMIT = 1232


class NameServer:
    """``async with NameServer() as names``: then ``names.set("w.test", "A", "127.0.0.2", ttl=5)``."""

    def __init__(self) -> None:
        self.questions: list[tuple[str, str]] = []
        self.silent = False
        self.failing = False
        self._records: dict[tuple[str, str], tuple[list[str], int]] = {}
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None
        self.port = 0

    def set(self, name: str, kind: str, *values: str, ttl: int = 5) -> None:
        """What a name says from now on; no value: the name exists without such a record."""
        self._records[f"{name}.", kind] = (list(values), ttl)

    def drop(self, name: str) -> None:
        """The name does not exist any more."""
        for key in [key for key in self._records if key[0] == f"{name}."]:
            del self._records[key]

    def asked(self, name: str, kind: str = "A") -> int:
        """How often that was asked."""
        return self.questions.count((f"{name}.", kind))

    def resolver(self) -> dns.asyncresolver.Resolver:
        """A resolver that asks this server and nobody else."""
        made = dns.asyncresolver.Resolver(configure=False)
        made.nameservers = ["127.0.0.1"]
        made.port = self.port
        return made

    def answer(self, data: bytes, limit: int = 65535) -> bytes | None:
        """The reply to one question, cut off if it is too long for its transport."""
        question = dns.message.from_wire(data)
        (asked,) = question.question
        name, kind = asked.name.to_text(), dns.rdatatype.to_text(asked.rdtype)
        self.questions.append((name, kind))
        if self.silent:
            return None
        reply = dns.message.make_response(question)
        reply.flags |= dns.flags.RA
        if self.failing:
            reply.set_rcode(dns.rcode.SERVFAIL)
        elif not any(known == name for known, _ in self._records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        else:
            while (name, "CNAME") in self._records:
                values, ttl = self._records[name, "CNAME"]
                reply.answer.append(dns.rrset.from_text(name, ttl, "IN", "CNAME", *values))
                name = values[0]
            values, ttl = self._records.get((name, kind), ([], 0))
            if values:
                reply.answer.append(dns.rrset.from_text(name, ttl, "IN", kind, *values))
        wire = reply.to_wire(max_size=65535)
        if len(wire) > limit:
            reply.answer.clear()
            reply.flags |= dns.flags.TC
            wire = reply.to_wire()
        return wire

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int.from_bytes(await reader.readexactly(2), "big")
        reply = self.answer(await reader.readexactly(length))
        if reply is not None:
            writer.write(len(reply).to_bytes(2, "big") + reply)
            await writer.drain()
        writer.close()

    async def __aenter__(self) -> NameServer:
        self._tcp = await asyncio.start_server(self._stream, "127.0.0.1", 0)
        self.port = self._tcp.sockets[0].getsockname()[1]
        self._udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Udp(self), ("127.0.0.1", self.port)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._udp is not None
        assert self._tcp is not None
        self._udp.close()
        self._tcp.close()
        await self._tcp.wait_closed()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = self._server.answer(data, _UDP_LIMIT)
        if reply is not None:
            self._transport.sendto(reply, addr)
