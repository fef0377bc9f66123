"""The simulation of routing, small: every call ends once, and what a router knows helps it."""

import re
from pathlib import Path
from random import Random

import pytest

from examples import routing_simulation
from examples.routing_simulation import WAYS, Cluster, Router, Way, arrivals, simulate

SMALL = Cluster(replicas=96, front_ends=4, warm_up=0.5, loss=2.5, detection=1.0)


def way_of(name: str) -> Way:
    [way] = [way for way in WAYS if way.name == name]
    return way


def test_it_prints_a_table_and_draws_a_plot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "routing.png"
    routing_simulation.main(["--replicas", "48", "--front-ends", "3", "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "48 replicas, 8 per node, 80% busy; 768 calls per second" in printed
    for way in WAYS:
        assert re.search(rf"^{way.name} +\d+ +\d+ +\d+ +\d+$", printed, re.MULTILINE)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_call_ends_once_although_a_node_is_lost(way: Way) -> None:
    outcome = simulate(SMALL, way)
    assert outcome.done == len(list(arrivals(SMALL, Random(routing_simulation.SEED + 1))))
    assert outcome.hung > 0
    assert outcome.waits == sorted(outcome.waits)
    assert outcome.waits[0] >= 0


def test_who_knows_more_waits_less() -> None:
    names = ("random", "least, ties at random", "least, all calls known")
    outcomes = [simulate(SMALL, way_of(name)) for name in names]
    waits = [outcome.wait(0.99) for outcome in outcomes]
    assert waits == sorted(waits, reverse=True)
    assert outcomes[0].hung > 2 * outcomes[2].hung


def test_a_router_finds_the_fewest_from_its_start_on_and_forgets_the_dead() -> None:
    router = Router(range(10, 14), 1, Random(0))
    assert router.fewest(router.start) == 1
    router.began(1)
    router.began(2)
    assert router.fewest(router.start) == 3
    router.began(3)
    assert router.fewest(router.start) == 0
    router.began(0)
    assert router.fewest(router.start) == 1  # one each
    router.ended(2)
    assert router.fewest(router.start) == 2
    router.remove(range(12, 13))
    assert router.alive == [0, 1, 3]
    assert router.fewest(router.start) == 1
