"""YAML read strictly: a value knows its line, what nobody asks for is a mistake, and all mistakes are found at once.

The text is never turned into Python objects by tag. ``on`` is the text "on" unless a switch is asked for, so a pool
may be called ``no``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_cp import ConfigError
from vllm_cp.files import read_file

if TYPE_CHECKING:
    import yaml

__all__ = ["Document", "Mistakes", "Section", "Value", "Wrong"]

T = TypeVar("T")
D = TypeVar("D")
E = TypeVar("E", bound=Enum)

_OURS = "tag:yaml.org,2002:"
_NOTHING = f"{_OURS}null"
_PLAIN = tuple(f"{_OURS}{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "merge", "value"))
_SWITCH = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
#: A day.
_LONGEST_S = 86400.0


class Mistakes(ConfigError):
    """A file with mistakes: one line for each, with the place."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


class Wrong(Exception):
    """A value that cannot be used, and why. Becomes a mistake."""

    def __init__(self, value: Value, why: str) -> None:
        super().__init__(why)
        self.value = value


class Document:
    """One file and the mistakes found in it."""

    def __init__(self, path: Path) -> None:
        """Raises Mistakes for a file that cannot be read or is no YAML."""
        self.path = path
        self._found: list[tuple[int, str]] = []
        self.root = Value(self, _composed(self), "")

    def mistake(self, line: int, why: str) -> None:
        """Note one. Reading goes on."""
        # Twice the same happens where a mistake in one value shows in a second.
        if (line, why) not in self._found:
            self._found.append((line, why))

    def read(self, read: Callable[[Value], T], default: T) -> T:
        """The whole of it as ``read``, ``default`` when it is wrong as a whole."""
        try:
            return read(self.root)
        except Wrong as wrong:
            self.mistake(wrong.value.line, str(wrong))
            return default

    def check(self) -> None:
        """Raises Mistakes when there were any."""
        if self._found:
            raise Mistakes(tuple(f"{self.path}:{line}: {why}" for line, why in sorted(self._found)))


def _composed(document: Document) -> yaml.Node | None:
    try:
        import yaml
    except ImportError:
        raise ConfigError("a config file needs PyYAML: pip install 'vllm-cp[exporter]'") from None
    try:
        text = read_file(document.path, pipes=True).decode("utf-8")
    except OSError as error:
        raise Mistakes((f"cannot read config file {str(document.path)!r}: {error.strerror}",)) from None
    except UnicodeDecodeError:
        raise Mistakes((f"config file {str(document.path)!r} is not UTF-8 text",)) from None
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        why = f"{error.context}: {error.problem}" if error.context else f"{error.problem}"
        raise Mistakes((f"{document.path}:{line}: this is no YAML: {why}",)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise Mistakes((f"{document.path}:{line}: this is no YAML: unprintable character",)) from None
    except RecursionError:
        raise Mistakes((f"{document.path}:1: this is nested too deeply",)) from None


class Value:
    """One value, its line, and its name: ``pools.chat.min_ready``."""

    def __init__(self, document: Document, node: yaml.Node | None, name: str) -> None:
        self.document = document
        self.name = name
        self._node = node
        #: From 1.
        self.line = node.start_mark.line + 1 if node is not None else 1

    @property
    def empty(self) -> bool:
        """Whether nothing is there: ``key:`` and no more."""
        return self._node is None or self._node.tag == _NOTHING

    @property
    def plain(self) -> bool:
        """Whether it is one word or text, and neither list nor mapping."""
        return self._kind == "scalar"

    @property
    def is_list(self) -> bool:
        """Whether it is a list."""
        return self._kind == "sequence"

    @property
    def _kind(self) -> str:
        return str(getattr(self._node, "id", ""))

    def wrong(self, why: str) -> Wrong:
        """The exception to raise."""
        return Wrong(self, f"{self.name}: {why}" if self.name else why)

    def attempt(self, make: Callable[[], T]) -> T:
        """``make()``, whose ConfigError or ImportError is a mistake in this value. Raises Wrong."""
        try:
            return make()
        except (ConfigError, ImportError) as error:
            raise self.wrong(str(error)) from None

    # -- what it may be read as ----------------------------------------------------------------

    def text(self) -> str:
        """Text as written. Raises Wrong, as all of these do."""
        if self.empty:
            raise self.wrong("it has no value")
        node: Any = self._node
        if not self.plain:
            raise self.wrong("write one value here, not a list or a mapping")
        if node.tag not in _PLAIN:
            raise self.wrong(f"the tag {node.tag} means nothing here")
        text: str = node.value
        if not text.strip():
            raise self.wrong("it is empty")
        return text

    def switch(self) -> bool:
        """True or false."""
        found = _SWITCH.get(self.text().lower())
        if found is None:
            raise self.wrong(f"{self.text()!r} is neither true nor false")
        return found

    def whole(self) -> int:
        """A whole number from 0 up."""
        text = self.text()
        if not (text.isascii() and text.isdigit()):
            raise self.wrong(f"{text!r} is no whole number from 0 up")
        return int(text)

    def port(self) -> int:
        """A port."""
        text = self.text()
        if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
            raise self.wrong(f"{text!r} is no port from 1 to 65535")
        return int(text)

    def seconds(self) -> float:
        """A length of time above 0: a number of seconds, or with a unit."""
        text = self.text()
        found = _DURATION.fullmatch(text)
        length = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
        if not 0 < length <= _LONGEST_S:
            raise self.wrong(
                f"{text!r} is no time above 0 and up to a day; write 5s, 500ms, 2m, 1h or a number of seconds"
            )
        return length

    def word(self, options: Iterable[str]) -> str:
        """One of these words."""
        text, known = self.text(), tuple(options)
        # YAML has several words for no.
        if "off" in known and _SWITCH.get(text.lower()) is False:
            return "off"
        if text not in known:
            raise self.wrong(f"{text!r} is none of {', '.join(known)}")
        return text

    def choice(self, kind: type[E]) -> E:
        """One of an enum's values."""
        return kind(self.word(str(member.value) for member in kind))

    def path(self) -> Path:
        """A file, relative to the configuration file."""
        return (self.document.path.parent / self.text()).absolute()

    def items(self) -> list[Value]:
        """The values of a list; nothing is an empty one."""
        if self.empty:
            return []
        node: Any = self._node
        if not self.is_list:
            raise self.wrong("this is no list")
        return [Value(self.document, item, f"{self.name}[{place}]") for place, item in enumerate(node.value)]

    def each(self, read: Callable[[Value], T]) -> list[T]:
        """The values of a list as ``read``; those that are wrong are mistakes and left out."""
        made = []
        for item in self.items():
            try:
                made.append(read(item))
            except Wrong as wrong:
                self.document.mistake(wrong.value.line, str(wrong))
        return made

    def named(self, read: Callable[[str, Value], T]) -> dict[str, T]:
        """A mapping whose keys are names, its values as ``read``; those that are wrong are mistakes and left out."""
        made = {}
        for name, item in self._pairs():
            try:
                made[name] = read(name, item)
            except Wrong as wrong:
                self.document.mistake(wrong.value.line, str(wrong))
        return made

    def section(self) -> Section:
        """A mapping whose keys are known."""
        return Section(self, dict(self._pairs()))

    def _pairs(self) -> Iterator[tuple[str, Value]]:
        if self.empty:
            return
        node: Any = self._node
        if self._kind != "mapping":
            raise self.wrong("this is no mapping of keys to values" if self.name else "the file is no mapping")
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = Value(self.document, key_node, self.name)
            line = key.line
            if not key.plain or key.empty or not str(key_node.value).strip():
                self.document.mistake(line, key.wrong("a key is one word").args[0])
                continue
            text = key_node.value
            name = f"{self.name}.{text}" if self.name else text
            if text in seen:
                self.document.mistake(line, f"{name}: the key is there twice")
                continue
            seen.add(text)
            value = Value(self.document, value_node, name)
            # A value of several lines begins below its key, and it is the key that people look for.
            value.line = line
            yield text, value


class Section:
    """A mapping with known keys. At the end of its ``with``, a key that was not taken is a mistake."""

    def __init__(self, value: Value, values: dict[str, Value]) -> None:
        self.value = value
        self._values = values
        self._known: list[str] = []

    def take(self, key: str, read: Callable[[Value], T], default: D) -> T | D:
        """The value of ``key`` as read, ``default`` when it is absent or wrong."""
        found = self.get(key)
        if found is None:
            return default
        try:
            return read(found)
        except Wrong as wrong:
            self.value.document.mistake(wrong.value.line, str(wrong))
            return default

    def get(self, key: str) -> Value | None:
        """The value itself."""
        self._known.append(key)
        return self._values.get(key)

    def __enter__(self) -> Section:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            return
        for key, value in self._values.items():
            if key in self._known:
                continue
            near = difflib.get_close_matches(key, self._known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(self._known)}"
            where = f" in {self.value.name}" if self.value.name else ""
            self.value.document.mistake(value.line, f"unknown key {key!r}{where}; {hint}")
