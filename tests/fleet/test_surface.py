"""The two fleets have one face."""

from __future__ import annotations

import inspect

import vllm_cp.discovery
import vllm_cp.fleet
from vllm_cp.fleet import AsyncFleet, Fleet


def public(kind: type) -> dict[str, object]:
    return {name: member for name, member in vars(kind).items() if not name.startswith("_")}


def test_both_colours_have_the_same_names_and_parameters() -> None:
    """Whoever knows one knows the other."""
    sync, asynchronous = public(Fleet), public(AsyncFleet)
    assert list(sync) == list(asynchronous)
    for name, member in sync.items():
        if inspect.isfunction(member):
            other = asynchronous[name]
            assert inspect.isfunction(other)
            assert list(inspect.signature(member).parameters.items()) == [
                (key, parameter.replace(annotation=inspect.signature(member).parameters[key].annotation))
                for key, parameter in inspect.signature(other).parameters.items()
            ], name


def test_everything_public_is_documented() -> None:
    """Names, methods and properties alike."""
    for module in (vllm_cp.fleet, vllm_cp.discovery):
        assert module.__doc__
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.isclass(value) and not inspect.isfunction(value):
                continue
            assert value.__doc__, name
            for member_name, member in public(value).items() if inspect.isclass(value) else ():
                if inspect.isfunction(member) or isinstance(member, property):
                    assert member.__doc__, f"{name}.{member_name}"
