"""The file: written the same each time, read with the line of every mistake, whole or not at all."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.profile.facts import MODEL, SERVER, SOURCES
from vllm_cp import ConfigError, ModelInfo
from vllm_cp import profile as profiles
from vllm_cp.profile import Profile, dumps, load, loads, profile_of, save

LOCKED = profile_of(SERVER, MODEL, SOURCES, driver="570.133", notes=["load test of May"])


@pytest.mark.parametrize("lock", [LOCKED, profile_of(SERVER, MODEL, SOURCES[:1]), profile_of(SERVER, MODEL, ())])
def test_what_is_written_is_read(lock: Profile) -> None:
    """A profile comes back as it was, and its text is stable."""
    assert loads(dumps(lock)) == lock
    assert dumps(loads(dumps(lock))) == dumps(lock)


@given(st.text(min_size=1), st.lists(st.text(min_size=1)).map(tuple))
def test_any_name_survives(name: str, notes: tuple[str, ...]) -> None:
    """Whatever a model is called and a note says, the file is ASCII, one fact a line, and gives it back."""
    model = ModelInfo(model_id=name, served_model_aliases=(name, "a, b # c"))
    lock = profile_of(SERVER, model, (), notes=notes)
    text = dumps(lock)
    assert text.isascii()
    assert all(line.isprintable() for line in text.split("\n"))
    assert loads(text) == lock


def test_it_is_yaml() -> None:
    """A YAML reader sees the same facts."""
    said = yaml.safe_load(dumps(LOCKED))
    assert said["schema"] == 1
    assert said["facts"] == {k: list(v) if isinstance(v, tuple) else v for k, v in LOCKED.facts.items()}
    assert said["notes"] == ["load test of May"]


def test_it_may_be_edited_by_hand() -> None:
    """Unquoted text, comments, empty lines, Windows line ends and any indentation are fine; text stays text."""
    lock = loads(
        "# ours\r\nschema: 1\r\n\r\nfacts: # all\r\n   engine_version: 0.32   # the one\r\n"
        '\tdriver: "570 # 1" # quoted\n  total_kv_blocks: 7\nallow:\n  engine_version: [ "0.3*" ] # ticket 12\n'
        "  driver: 57*  # newer ones\n"
    )
    assert lock.facts == {"engine_version": "0.32", "driver": "570 # 1", "total_kv_blocks": 7}
    assert {name: (rule.text, rule.comment) for name, rule in lock.allow.items()} == {
        "engine_version": ('[ "0.3*" ]', "ticket 12"),
        "driver": ("57*", "newer ones"),
    }
    assert loads(dumps(lock)) == lock


BAD = {
    "no schema": ("", "lock: it has no"),
    "facts before the schema": ("facts:\n", 'line 1: "schema: 1" has to come first'),
    "newer schema": ("schema: 2\nfuture: x\n", "line 1: schema 2 is newer than this vllm-cp, which reads up to 1"),
    "schema zero": ("schema: 0\n", "line 1: schema is a number from 1 on"),
    "schema in words": ("schema: one\n", "line 1: schema is a whole number"),
    "unknown section": ("schema: 1\nfact:\n", "line 2: unknown key fact; did you mean facts?"),
    "unknown fact": (
        "schema: 1\nfacts:\n  max_model_length: 1\n",
        "line 3: unknown key max_model_length; did you mean",
    ),
    "unknown rule": ("schema: 1\nallow:\n  engine: any\n", "line 3: unknown key engine"),
    "unknown KV fact": ("schema: 1\nallow:\n  kv_events.0.topics: any\n", "did you mean kv_events.0.topic?"),
    "odd rank": ("schema: 1\nfacts:\n  kv_events.x.topic: a\n", "line 3: unknown key kv_events.x.topic"),
    "not indented": ("schema: 1\nfacts:\nengine_version: 1\n", "line 3: engine_version belongs into a section"),
    "indented too early": ("schema: 1\n  engine_version: 1\n", "line 2: the line starts with spaces and no section"),
    "twice": ("schema: 1\nfacts:\n  driver: 1\n  driver: 2\n", "line 4: driver stands in line 3 already"),
    "section twice": ("schema: 1\nfacts:\nallow:\nfacts:\n", "line 4: facts stands in line 2 already"),
    "section with a value": ("schema: 1\nfacts: none\n", "line 2: facts is a section"),
    "no colon": ("schema: 1\nfacts:\n  driver\n", 'line 3: a line is "name: value"'),
    "no space": ("schema: 1\nfacts:\n  driver:570\n", 'line 3: a line is "name: value"'),
    "no value": ("schema: 1\nfacts:\n  driver: # none\n", "line 3: driver has no value; null is for"),
    "empty text": ('schema: 1\nfacts:\n  driver: ""\n', "line 3: driver has no value"),
    "open quote": ('schema: 1\nfacts:\n  driver: "570\n', "line 3: driver: quotes and brackets have to be closed"),
    "two values": ('schema: 1\nfacts:\n  driver: "a" "b"\n', "line 3: driver has more than one value"),
    "no number": ("schema: 1\nfacts:\n  hwm: 1\n  max_loras: few\n", "line 3: unknown key hwm"),
    "text for a number": (
        "schema: 1\nfacts:\n  max_loras: few\n",
        "line 3: max_loras is a whole number or null, not few",
    ),
    "endless number": (f"schema: 1\nfacts:\n  max_loras: {'9' * 5000}\n", "line 3: max_loras is a whole number"),
    "negative": ("schema: 1\nfacts:\n  max_loras: -1\n", "is a whole number or null, not -1"),
    "text for a flag": ("schema: 1\nfacts:\n  supports_lora: yes\n", "is true, false or null, not yes"),
    "text for a list": ("schema: 1\nfacts:\n  served_model_aliases: a\n", 'is a list, ["a", "b"], or null, not a'),
    "list of lists": ("schema: 1\nfacts:\n  served_model_aliases: [[]]\n", 'is a list, ["a", "b"], or null'),
    "deep list": (f"schema: 1\nfacts:\n  served_model_aliases: {'[' * 9999}\n", "brackets have to be closed"),
    "unquoted list": ("schema: 1\nallow:\n  driver: [a, b]\n", "line 3: driver: quotes and brackets"),
    "empty list": ("schema: 1\nallow:\n  driver: []\n", "line 3: driver: an empty list allows nothing"),
    "endless range": ("schema: 1\nallow:\n  max_loras: ..\n", "line 3: max_loras: a range is 1..9, 1.. or ..9"),
    "odd range": ("schema: 1\nallow:\n  max_loras: 1..x\n", "line 3: max_loras: a range is"),
    "pattern of a number": ("schema: 1\nallow:\n  max_loras: 4*\n", "max_loras is a whole number or null, not 4*"),
    "note without dash": ("schema: 1\nnotes:\n  hello\n", 'line 3: a note is a line "- text"'),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_refused_with_their_line(case: str) -> None:
    """What a reader does not understand it does not pass over: it names the line and, where it can, the right word."""
    text, said = BAD[case]
    with pytest.raises(ConfigError) as caught:
        loads(text)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that is missing, a directory, or no text is refused by name."""
    odd = tmp_path / "odd.lock"
    odd.write_bytes(b"\xff\xfe")
    for path, said in ((tmp_path / "gone", "No such file"), (tmp_path, "Is a directory"), (odd, "is not UTF-8 text")):
        with pytest.raises(ConfigError, match=said):
            load(path)


def test_saving_keeps_links_and_modes(tmp_path: Path) -> None:
    """A new file can be read by all, an old one keeps its mode, a link goes on pointing at it."""
    path, link = tmp_path / "a.lock", tmp_path / "link"
    link.symlink_to(path)
    save(LOCKED, link)
    assert load(path) == LOCKED
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o600)
    save(replace(LOCKED, notes=()), link)
    assert (link.is_symlink(), load(path).notes, stat.S_IMODE(path.stat().st_mode)) == (True, (), 0o600)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.lock", "link"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full, the old lock is whole and nothing else lies about."""
    path = tmp_path / "a.lock"
    save(LOCKED, path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(replace(LOCKED, notes=()), path)
    assert load(path) == LOCKED
    assert list(tmp_path.iterdir()) == [path]


def test_all_names_are_there() -> None:
    """Every public name exists."""
    assert all(hasattr(profiles, name) for name in profiles.__all__)
