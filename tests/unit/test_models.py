"""Models are frozen facts: keyword-only, slotted, and unknown is None."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from vllm_cp import HealthStatus, ModelInfo, Parallelism, RlCapabilities, ServerInfo, models
from vllm_cp.models.startup import Startup


def public_classes() -> Iterator[type[Any]]:
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        home = importlib.import_module(module.name)
        for name in home.__all__:
            if inspect.isclass(kind := getattr(home, name)):
                yield kind


CLASSES = [kind for kind in public_classes() if dataclasses.is_dataclass(kind)]
ENUMS = [kind for kind in public_classes() if issubclass(kind, Enum)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_models_are_frozen_slotted_and_keyword_only(kind: type[Any]) -> None:
    """Nobody changes a fact, a misspelt field is an error, and no order of arguments can be mistaken."""
    options = kind.__dataclass_params__
    assert options.frozen
    assert "__slots__" in vars(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert (kind.__doc__ or "").strip()
    assert not (kind.__doc__ or "").startswith(f"{kind.__name__}(")


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_enums_are_their_words(kind: type[Enum]) -> None:
    """An enum's value is the word that pages and JSON show."""
    assert all(isinstance(member.value, str) for member in kind)
    assert all(member == member.value for member in kind)


def test_there_are_models_at_all() -> None:
    """The two tests above look at something."""
    assert {"ServerInfo", "KvEventSource", "Episode", "Rungs"} <= {kind.__name__ for kind in CLASSES}
    assert HealthStatus in ENUMS


@pytest.mark.parametrize("kind", [ServerInfo, Parallelism, RlCapabilities, ModelInfo])
def test_what_was_not_said_is_unknown(kind: type[Any]) -> None:
    """A server that says nothing leaves every number None; text is empty, a flag is off, rank zero is a rank."""
    for field in dataclasses.fields(kind):
        value = getattr(kind(), field.name)
        assert value in (None, "", (), False) or field.name == "data_parallel_rank", field.name
        assert value != 0 or isinstance(value, bool) or field.name == "data_parallel_rank", field.name


def test_facts_travel() -> None:
    """A fact can be pickled, copied and compared."""
    info = ServerInfo(instance_id="1", parallelism=Parallelism(tensor_parallel_size=2))
    assert pickle.loads(pickle.dumps(info)) == info
    assert copy.deepcopy(info) == info
    assert hash(info) == hash(dataclasses.replace(info))
    assert dataclasses.asdict(info)["parallelism"]["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.28.0", None), ("0.29.0", False), ("0.33.0rc1", False), ("1.0", False), ("", None), ("dev", None)],
)
def test_lora_is_a_no_only_where_the_server_could_say_yes(version: str, known: bool | None) -> None:
    """A plain no and an older server look alike on the wire; the version tells them apart."""
    assert ModelInfo().seen_on(version).supports_lora is known
    assert ModelInfo(supports_lora=True).seen_on(version).supports_lora is True


def test_a_start_has_phases_only_where_it_was_witnessed() -> None:
    """The clocks of a start count from its beginning, and only what somebody saw."""
    assert Startup().phases() == {}
    assert Startup(socket=10.0, serving=11.0).phases() == {}
    start = Startup(began=10.0, socket=35.0, serving=36.0, first_response=36.5)
    assert start.phases() == {"to_socket": 25.0, "to_serving": 26.0, "to_first_response": 26.5}
