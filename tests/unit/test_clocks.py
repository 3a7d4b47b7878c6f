"""The clocks of a start: from a closed port to the first answer, and only what was witnessed."""

from __future__ import annotations

import pytest

from tests.unit.story import SERVING, WALL, YES, Story
from vllm_cp.models.probe import EngineMetrics


def test_a_start_that_was_watched_has_all_its_clocks() -> None:
    """From the port seen closed to the port, health, and the first generation."""
    story = Story().down(10).at(11, contact=True).at(12, contact=True, health=SERVING)
    story.at(12.5, contact=True, instance_id="one").up(13).at(14, contact=True, canary=True).lives(60)
    assert story.state.startup.phases() == pytest.approx(
        {"to_socket": 10.0, "to_serving": 11.0, "to_warm": 13.0, "to_first_response": 13.0}
    )


def test_a_worker_that_was_up_has_none() -> None:
    """Of a worker that was up when it was first seen nobody knows when it started."""
    assert Story().up(0, canary=True).lives(30).state.startup.phases() == {}


def test_the_process_knows_better_when_it_began() -> None:
    """Where the worker's page tells when its process started, the clocks count from there."""
    story = Story().down(10).up(11).at(12, contact=True, metrics=EngineMetrics(process_start=WALL - 20))
    assert story.state.startup.phases()["to_socket"] == pytest.approx(31.0)


def test_a_process_that_began_after_its_port_is_another_one() -> None:
    """A page that tells of a later start than the port was seen is not believed."""
    story = Story().down(10).up(11).at(12, contact=True, metrics=EngineMetrics(process_start=WALL + 600))
    assert story.state.startup.phases()["to_socket"] == pytest.approx(10.0)


def test_an_outage_of_the_same_instance_is_no_start() -> None:
    """A network that comes back is no start: the clocks stay those of the start that was watched."""
    story = Story().down(10).up(11, "one")
    phases = story.state.startup.phases()
    story.lives(20).down(80).up(81, "one").lives(100)
    assert story.state.startup.phases() == phases


def test_a_restart_has_its_own_clocks() -> None:
    """Each instance has its own: the one that follows a crash counts from the port seen closed."""
    story = Story().up(0, "one").lives(10).down(50)
    story.at(51, contact=True, health=SERVING, asked=True, round_trip=YES).at(52, contact=True, instance_id="two")
    assert story.state.startup.phases() == pytest.approx({"to_socket": 40.0, "to_serving": 40.0})
