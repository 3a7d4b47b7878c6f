"""Block YAML for our own records: mappings with plain keys, lists, strings, numbers, booleans and nulls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

__all__ = ["block_yaml"]


def block_yaml(value: object) -> str:
    """The value as a block-style YAML document, in ASCII. Strings are always quoted: no word turns into a boolean."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            first, *rest = _lines(inner)
            if isinstance(inner, Mapping | list | tuple) and inner:
                yield f"{key}:"
                yield from (f"  {line}" for line in (first, *rest))
            else:
                yield f"{key}: {first}"
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            first, *rest = _lines(inner)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _scalar(value: object) -> str:
    text = json.dumps(value, ensure_ascii=not isinstance(value, str))
    if isinstance(value, float) and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as a word
    # Python escapes as YAML's double quotes want it; JSON would write astral characters as two halves.
    return text.encode("ascii", "backslashreplace").decode().replace("\x7f", "\\x7f")
