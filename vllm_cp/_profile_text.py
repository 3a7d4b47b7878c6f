"""The text of a deployment lock: which facts it has, and how they are written and read. See ``vllm_cp.profile``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from vllm_cp.errors import ConfigError
from vllm_cp.models.profile import Allowed, Profile, Value

__all__ = ["KV", "MODEL", "PARALLELISM", "RANKS", "RL", "SCHEMA", "SERVER", "dumps", "for_all_ranks", "loads"]

#: The schema that is written, and the newest that is read.
SCHEMA = 1

# The facts of each part and their kinds, in the order of the file.
SERVER = {
    "engine_version": str,
    "proto_version": str,
    "instance_id": str,
    "max_model_len": int,
    "max_running_requests": int,
    "max_batched_tokens": int,
    "max_loras": int,
    "kv_block_size": int,
    "effective_attention_block_size": int,
    "total_kv_blocks": int,
}
MODEL = {
    "model_id": str,
    "served_model_name": str,
    "served_model_aliases": tuple,
    "supports_text_input": bool,
    "supports_token_ids_input": bool,
    "supports_lora": bool,
    "supports_multimodal": bool,
    "reasoning_parser": str,
    "tool_call_parser": str,
}
PARALLELISM = {
    "tensor_parallel_size": int,
    "pipeline_parallel_size": int,
    "data_parallel_size": int,
    "data_parallel_size_local": int,
    "data_parallel_rank": int,
    "decode_context_parallel_size": int,
    "world_size": int,
}
RL = {
    "sleep_mode_enabled": bool,
    "weight_transfer_enabled": bool,
    "weight_transfer_backend": str,
    "draft_weight_updates_enabled": bool,
}
KV = {
    "transport": str,
    "endpoint": str,
    "replay_endpoint": str,
    "topic": str,
    "encoding": str,
    "schema_version": int,
    "buffer_steps": int,
    "hwm": int,
    "max_queue_size": int,
}
RANKS = "kv_events.ranks"
_KINDS: dict[str, type] = {
    "image_digest": str,
    "driver": str,
    **SERVER,
    **MODEL,
    **PARALLELISM,
    **RL,
    RANKS: tuple,
}
_KV_KEY = re.compile(r"kv_events\.(\*|all(?:-\d+)?|\d+(?:-\d+)?)\.(\w+)")
# More digits than any count has would make reading slow.
_RANGE = re.compile(r"\d{0,18}\.\.\d{0,18}", re.ASCII)
_COUNT = re.compile(r"\d{1,18}", re.ASCII)
_SECTIONS = ("facts", "notes", "allow")
_WANTED = {int: "a whole number or null", bool: "true, false or null", tuple: 'a list, ["a", "b"], or null'}

_HEAD = """\
# Deployment lock of vllm-cp: what a vLLM worker says it is. "vllm-cp diff FILE" compares workers with it.
# One fact a line. null: not reported. A fact whose line is missing is not compared.
# What may differ stands below "allow:", such as
#   engine_version: 0.32.*
#   total_kv_blocks: 40000..42000
#   driver: any
"""


def for_all_ranks(name: str) -> str:
    """``kv_events.3.topic`` -> ``kv_events.*.topic``; "" for other facts."""
    found = _KV_KEY.fullmatch(name)
    return f"kv_events.*.{found[2]}" if found else ""


def dumps(profile: Profile) -> str:
    """The file's text; the same profile gives the same text."""
    lines = [f"schema: {SCHEMA}", "", "facts:"]
    lines += [f"  {name}: {_shown(value)}" for name, value in profile.facts.items()]
    if profile.notes:
        lines += ["", "notes:", *(f"  - {_shown(note)}" for note in profile.notes)]
    lines += ["", "allow:"]
    for name, rule in profile.allow.items():
        lines.append(f"  {name}: {rule.text}" + (f"  # {rule.comment}" if rule.comment else ""))
    return _HEAD + "\n".join(lines) + "\n"


def _shown(value: Value) -> str:
    # ASCII: right in every locale, and nothing in it can move a cursor.
    return json.dumps(list(value) if isinstance(value, tuple) else value).replace("\x7f", "\\u007f")


def loads(text: str, name: str = "lock") -> Profile:
    """Read the file's text, which is called ``name``. Raises ConfigError that names the line."""
    reader = _Reader(name)
    for number, line in enumerate(text.split("\n"), 1):
        reader.line(number, line.rstrip())
    return reader.done()


class _Reader:
    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._section = ""
        self._schema = 0
        self._lines: dict[tuple[str, str], int] = {}
        self._facts: dict[str, Value] = {}
        self._allow: dict[str, Allowed] = {}
        self._notes: list[str] = []

    def line(self, number: int, line: str) -> None:
        """Take one line."""
        self._number = number
        bare = line.lstrip()
        if not bare or bare.startswith("#"):
            return
        section = self._section if bare != line else ""
        if section == "notes":
            if not bare.startswith("- "):
                self._refuse('a note is a line "- text"')
            self._notes.append(self._text("the note", bare[2:].strip()))
            return
        key, colon, rest = bare.partition(":")
        if not colon or rest[:1] not in ("", " ", "\t"):
            self._refuse('a line is "name: value"')
        if bare != line and not section:
            self._refuse("the line starts with spaces and no section is open; sections are " + ", ".join(_SECTIONS))
        key, rest = key.rstrip(), rest.strip()
        if (section, key) in self._lines:
            self._refuse(f"{key} stands in line {self._lines[section, key]} already")
        self._lines[section, key] = number
        if section == "facts":
            self._facts[key] = self._value(key, self._kind(key), rest)
        elif section == "allow":
            self._allow[key] = self._rule(key, self._kind(key), rest)
        else:
            self._top(key, rest)

    def done(self) -> Profile:
        """What was read."""
        self._number = 0
        if not self._schema:
            self._refuse('it has no "schema:": is this a lock of vllm-cp?')
        return Profile(facts=self._facts, allow=self._allow, notes=tuple(self._notes))

    def _top(self, key: str, rest: str) -> None:
        if key == "schema":
            schema = self._value(key, int, rest)
            if not isinstance(schema, int) or schema < 1:
                self._refuse("schema is a number from 1 on")
            if schema > SCHEMA:
                self._refuse(f"schema {schema} is newer than this vllm-cp, which reads up to {SCHEMA}: update it")
            self._schema = schema
        elif not self._schema:
            # What follows may be of a newer schema, and then must not be called a slip.
            self._refuse('"schema: 1" has to come first; is this a lock of vllm-cp?')
        elif key in _KINDS or _KV_KEY.fullmatch(key):
            self._refuse(f"{key} belongs into a section, so its line starts with spaces")
        elif key not in _SECTIONS:
            self._unknown(key, ("schema", *_SECTIONS))
        elif _uncommented(rest):
            self._refuse(f"{key} is a section: its lines stand below it, indented")
        else:
            self._section = key

    def _kind(self, key: str) -> type:
        if key in _KINDS:
            return _KINDS[key]
        found = _KV_KEY.fullmatch(key)
        if found is None:
            return self._unknown(key, (*_KINDS, *(f"kv_events.*.{name}" for name in KV)))
        if found[2] not in KV:
            return self._unknown(key, [f"kv_events.{found[1]}.{name}" for name in KV])
        return KV[found[2]]

    def _value(self, key: str, kind: type, text: str) -> Value:
        bare = _uncommented(text)
        if bare in ("", '""'):
            self._refuse(f"{key} has no value; null is for what is not reported")
        if bare == "null":
            return None
        if kind is str:
            return self._text(key, text)
        if kind is int and _COUNT.fullmatch(bare):
            return int(bare)
        if kind is bool and bare in ("true", "false"):
            return bare == "true"
        if kind is tuple and bare.startswith("["):
            items = self._json(key, text)
            if all(type(item) in (str, int) for item in items):
                return tuple(items)
        return self._refuse(f"{key} is {_WANTED[kind]}, not {bare}")

    def _rule(self, key: str, kind: type, text: str) -> Allowed:
        if text.startswith("[") and kind is not tuple:
            items: list[Any] = self._json(key, text)
            alternatives: tuple[Value, ...] = tuple(self._item(key, kind, item) for item in items)
            if not items:
                self._refuse(f"{key}: an empty list allows nothing: leave the line out")
        elif _uncommented(text) == "any":
            alternatives = ()
        else:
            alternatives = (self._alternative(key, kind, text),)
        shown = _uncommented(text) if not text.startswith(('"', "[")) else text[: self._end(key, text)]
        comment = text[len(shown) :].strip().removeprefix("#").strip()
        return Allowed(text=shown, alternatives=alternatives, any=not alternatives, comment=comment)

    def _item(self, key: str, kind: type, item: object) -> Value:
        # JSON has read it already: text in quotes is text, whatever stands in it.
        if isinstance(item, str) and kind is str:
            return item
        return self._alternative(key, kind, item if isinstance(item, str) else json.dumps(item))

    def _alternative(self, key: str, kind: type, text: str) -> Value:
        bare = _uncommented(text).strip('"')
        if kind is not int or ".." not in bare:
            return self._value(key, kind, text)
        if not _RANGE.fullmatch(bare) or bare == "..":
            self._refuse(f"{key}: a range is 1..9, 1.. or ..9, not {bare}")
        return bare

    def _text(self, key: str, text: str) -> str:
        if not text.startswith('"'):
            return _uncommented(text)
        value: str = self._json(key, text)
        return value

    def _json(self, key: str, text: str) -> Any:
        return json.loads(text[: self._end(key, text)])

    def _end(self, key: str, text: str) -> int:
        """Where the quoted text or list ends at whose beginning ``text`` starts; a comment may follow."""
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            self._refuse(f"{key}: quotes and brackets have to be closed, and text in a list quoted: {text}")
        if _uncommented(text[end:]):
            self._refuse(f"{key} has more than one value: {text}")
        return end

    def _unknown(self, key: str, known: Iterable[str]) -> NoReturn:
        close = get_close_matches(key, list(known), n=1)
        self._refuse(f"unknown key {key}" + (f"; did you mean {close[0]}?" if close else ""))

    def _refuse(self, why: str) -> NoReturn:
        place = f"{self._name}, line {self._number}" if self._number else self._name
        raise ConfigError(f"{place}: {why}")


def _uncommented(text: str) -> str:
    return re.split(r"(?:^|\s)#", text, maxsplit=1)[0].strip()
