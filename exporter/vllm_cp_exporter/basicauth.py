"""Basic authentication against bcrypt hashes, which are slow on purpose: checked in a thread, and remembered."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

__all__ = ["BasicAuth"]

#: Verdicts that are remembered. The toolkit keeps as many.
_REMEMBERED = 100
#: bcrypt looks at no more of a password, and newer libraries refuse longer ones.
_LONGEST = 72
# Of a password that nobody has: an unknown user takes as long as a known one.
_NOBODY = "$2b$10$CwTycUXWue0Thq9StjUM0uJ8rBGPpYbNzVLUuHyvTz5y4tMUxXyiO"


class BasicAuth:
    """Knows who may come in. Used on the event loop; passwords are kept nowhere, not even hashed without a key."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()
        # One thread: whoever guesses passwords uses one core, and never those that make pages.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bcrypt")

    async def allows(self, users: Mapping[str, str], header: str) -> bool:
        """Whether an Authorization header is one of these users'."""
        user, password = _read(header)
        if user is None or len(password) > _LONGEST:
            return False
        hashed = users.get(user, _NOBODY)
        told = b"\0".join((user.encode("utf-8", "surrogatepass"), hashed.encode(), password))
        seal = hashlib.blake2b(told, key=self._key).digest()
        known = self._verdicts.get(seal)
        if known is None:
            right = await asyncio.get_running_loop().run_in_executor(self._thread, _matches, password, hashed)
            known = right and user in users
            self._verdicts[seal] = known
            if len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)
        return known

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _read(header: str) -> tuple[str | None, bytes]:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None, b""
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode("utf-8"), password) if colon else (None, b"")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None, b""


def _matches(password: bytes, hashed: str) -> bool:
    import bcrypt

    try:
        return bcrypt.checkpw(password, hashed.encode())
    except ValueError:  # a password with a zero byte in it
        return False
