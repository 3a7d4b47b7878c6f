"""The context file: named fleets, with the files that hold their secrets, never the secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from vllm_cp.cli._text import plain
from vllm_cp.files import read_file

__all__ = ["BrokenFileError", "Store", "file_path", "known_names", "load", "locked", "save"]

#: The only layout there has been.
_VERSION = 1
#: Settings of one context and their types. Files are absolute paths.
_SETTINGS: dict[str, type] = {
    "targets": list,
    "file_sd": list,
    "dns": list,
    "k8s": list,
    "pool": str,
    "via": str,
    "timeout": float,
    "tls": bool,
    "tls_ca": str,
    "tls_cert": str,
    "tls_key": str,
    "server_name": str,
    "token_file": str,
    "insecure_token": bool,
    "proxy": bool,
}


class BrokenFileError(Exception):
    """The context file can't be used; the message is one line that says where and why."""


class Store(NamedTuple):
    """What the file holds."""

    path: Path
    #: The context in use when none is named.
    current: str | None
    contexts: dict[str, dict[str, Any]]


def file_path() -> Path | None:
    """Where the file is, or would be; ``None`` for a user without a home."""
    if named := os.environ.get("VLLM_CP_CONTEXT_FILE"):
        return Path(named)
    # By the standard a relative path here is to be ignored.
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.config")
    return Path(base) / "vllm-cp" / "contexts.json" if os.path.isabs(base) else None


def load(path: Path) -> Store:
    """The file's contents, empty when there is no file. Raises BrokenFileError."""
    try:
        text = read_file(path).decode()
    except FileNotFoundError:
        return Store(path, None, {})
    except OSError as error:
        raise _broken(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _broken(path, "is not UTF-8 text") from None
    import json

    try:
        document = json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        raise _broken(path, f"is no JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"is broken: {error}") from None
    problem = _problem(document)
    if problem:
        raise _broken(path, problem)
    return Store(path, document["current"], document["contexts"])


def save(store: Store) -> None:
    """Replace the file as a whole, readable by its owner only. Raises OSError; then the old file is as it was."""
    import json
    import tempfile

    document = {"version": _VERSION, "current": store.current, "contexts": store.contexts}
    # Through a link, so that one kept elsewhere (in a repository of dot files) stays one.
    path = Path(os.path.realpath(store.path))
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=".contexts-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(json.dumps(document, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(made)
        raise


@contextmanager
def locked(path: Path) -> Iterator[Store]:
    """The file's contents, nobody else changing it meanwhile. Raises BrokenFileError, OSError."""
    import fcntl

    folder = Path(os.path.realpath(path)).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield load(path)
    finally:
        os.close(descriptor)


def known_names() -> list[str]:
    """The contexts there are, for completion: none when the file can't be used."""
    path = file_path()
    with suppress(BrokenFileError):
        return sorted(load(path).contexts) if path is not None else []
    return []


def _broken(path: Path, problem: str) -> BrokenFileError:
    return BrokenFileError(f"the context file {plain(str(path))} {plain(problem)}; mend it or move it away")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return made


def _problem(document: Any) -> str:
    """What is wrong with a document; "" for nothing. What isn't known is refused: writing would lose it."""
    if not isinstance(document, dict) or "version" not in document:
        return "is no context file: it has no version"
    if document["version"] != _VERSION:
        return f"has version {document['version']!r}, and this vllm-cp knows version {_VERSION} only"
    if stray := set(document) ^ {"version", "current", "contexts"}:
        key = sorted(stray)[0]
        return f"{'has an unknown key' if key in document else 'lacks the key'} {key!r}"
    contexts, current = document["contexts"], document["current"]
    if not isinstance(contexts, dict):
        return "has contexts that are no object"
    if current is not None and (not isinstance(current, str) or current not in contexts):
        return f"names {current!r} as current, and has no such context"
    for name, settings in contexts.items():
        if found := _problem_with(settings):
            return f"has a context {name!r} {found}"
    return ""


def _problem_with(settings: Any) -> str:
    if not isinstance(settings, dict):
        return "that is no object"
    for key, value in settings.items():
        if key == "token":
            return "with a token in it: take it out, and name a token_file"
        if key not in _SETTINGS:
            return f"with an unknown key {key!r}"
        kind = _SETTINGS[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number if kind is float else isinstance(value, kind)) or value == "":
            return f"whose {key} is {value!r}"
        if kind is list and not (isinstance(value, list) and value and all(isinstance(text, str) for text in value)):
            return f"whose {key} is no list of words"
    if not any((kind is list or key == "via") and key in settings for key, kind in _SETTINGS.items()):
        return "without a list of targets"
    return ""
