"""Simulate how front ends route calls to 1,000 replicas, and the loss of a node.

    python examples/routing_simulation.py
    python examples/routing_simulation.py --replicas 96 --front-ends 4 --load 0.7 --plot routing.png

A `ReplicaPool` gives each call to the replica with the fewest outstanding calls. One process knows
all of them. If several processes (front ends) share the replicas, each one knows only its own
calls. This example compares ways to route: how long calls wait for their replica, how the number of
front ends matters, and how many calls hang when a node stops without a word. Nothing is served: the
calls are events in simulated time. Each way is simulated in a worker process of its own.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

import aiopar

SEED = 7
FRONT_ENDS = (1, 4, 16, 64)
"""The numbers of front ends that the plot compares."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The replicas, their calls, and the loss of the first node. Times are in seconds."""

    replicas: int = 1000
    per_node: int = 8
    front_ends: int = 8
    load: float = 0.8
    """How busy the replicas are on average, from 0 to 1."""
    service: float = 0.05
    """The mean time that a replica needs for a call."""
    spread: float = 1.0
    """The sigma of the log-normal distribution of service times: p99 is 6 times the mean."""
    warm_up: float = 3.0
    """Calls that arrive earlier are not measured: the queues are still filling."""
    loss: float = 9.0
    """When the first node stops to answer."""
    detection: float = 2.0
    """How long after the loss the front ends learn of it, and send its calls elsewhere."""

    @property
    def calls_per_second(self) -> float:
        return self.load * self.replicas / self.service

    @property
    def end(self) -> float:
        return self.loss + self.detection + 1


class Router:
    """The replicas that a front end uses, and the outstanding calls that it knows of.

    Args:
        replicas: The numbers of the replicas.
        start: The position from which `fewest` searches.
        random: For rules that choose at random.
    """

    def __init__(self, replicas: Sequence[int], start: int, random: Random) -> None:
        self.replicas = replicas
        self.alive = list(range(len(replicas)))
        self.outstanding = [0] * len(replicas)
        self.start = start
        self.random = random
        self.turns = count(random.randrange(len(replicas)))
        self._having = [len(replicas)]
        """How many living replicas have 0, 1, ... outstanding calls."""
        self._fewest = 0

    def began(self, position: int) -> None:
        calls = self.outstanding[position] + 1
        self.outstanding[position] = calls
        if calls == len(self._having):
            self._having.append(0)
        self._having[calls - 1] -= 1
        self._having[calls] += 1
        self._skip_empty()

    def ended(self, position: int) -> None:
        calls = self.outstanding[position] - 1
        self.outstanding[position] = calls
        self._having[calls + 1] -= 1
        self._having[calls] += 1
        self._fewest = min(self._fewest, calls)

    def remove(self, dead: range) -> None:
        for position in [one for one in self.alive if self.replicas[one] in dead]:
            self.alive.remove(position)
            self._having[self.outstanding[position]] -= 1
            self.outstanding[position] = -1  # never the fewest
        self._skip_empty()

    def fewest(self, start: int) -> int:
        """The first position from `start` on with the fewest outstanding calls."""
        try:
            return self.outstanding.index(self._fewest, start)
        except ValueError:
            return self.outstanding.index(self._fewest)

    def _skip_empty(self) -> None:
        while not self._having[self._fewest]:
            self._fewest += 1


Rule = Callable[[Router], int]
"""Chooses the position of a replica."""


def at_random(router: Router) -> int:
    return router.random.choice(router.alive)


def in_turn(router: Router) -> int:
    return router.alive[next(router.turns) % len(router.alive)]


def better_of_two(router: Router) -> int:
    one, other = at_random(router), at_random(router)
    return one if router.outstanding[one] <= router.outstanding[other] else other


def fewest(router: Router) -> int:
    return router.fewest(router.start)


def fewest_at_random(router: Router) -> int:
    return router.fewest(router.random.randrange(len(router.replicas)))


@dataclass(frozen=True, slots=True)
class Way:
    """A way to route calls."""

    name: str
    rule: Rule
    see_all_calls: bool = False
    """Whether each front end knows the calls of all front ends."""
    own_replicas: bool = False
    """Whether each front end has replicas of its own, a part of all."""
    start_apart: bool = False
    """Whether the front ends search from different replicas on."""

    def routers(self, cluster: Cluster, random: Random) -> list[Router]:
        """The router of each front end."""
        number, front_ends = cluster.replicas, cluster.front_ends
        if self.see_all_calls:
            return [Router(range(number), 0, random)] * front_ends
        if self.own_replicas:  # spread over the nodes
            parts = [range(index, number, front_ends) for index in range(front_ends)]
            return [Router(part, 0, random) for part in parts]
        apart = number // front_ends if self.start_apart else 0
        return [Router(range(number), index * apart, random) for index in range(front_ends)]


TIES = Way("least, ties at random", fewest_at_random)
APART = Way("least, each starts elsewhere", fewest, start_apart=True)
OWN = Way("least, own replicas only", fewest_at_random, own_replicas=True)
WAYS = (
    Way("random", at_random),
    Way("round robin", in_turn),
    Way("two choices, own calls", better_of_two),
    Way("two choices, replicas asked", better_of_two, see_all_calls=True),
    Way("least, ties to the first", fewest),
    TIES,
    APART,
    OWN,
    Way("least, all calls known", fewest_at_random, see_all_calls=True),
)
COMPARED = (TIES, APART, OWN)
"""These are simulated for several numbers of front ends."""


@dataclass(slots=True)
class Outcome:
    """What became of the calls."""

    waits: list[float] = field(default_factory=list)
    """Seconds that calls waited for their replica, ascending; before the loss."""
    hung: int = 0
    """Calls that hung on the lost node until the loss was detected."""
    done: int = 0
    """Calls with a result, in the whole simulation."""

    def wait(self, quantile: float) -> float:
        return self.waits[math.ceil(len(self.waits) * quantile) - 1]


class Running(NamedTuple):
    """A call that waits for its replica, or runs on it."""

    ends: float
    arrived: float
    service: float
    router: Router
    position: int

    @property
    def replica(self) -> int:
        return self.router.replicas[self.position]


def arrivals(cluster: Cluster, random: Random) -> Iterator[tuple[float, float, int]]:
    """When calls arrive, how long they take, and at which front end they arrive."""
    mean = math.log(cluster.service) - cluster.spread**2 / 2
    now = random.expovariate(cluster.calls_per_second)
    while now < cluster.end:
        yield now, random.lognormvariate(mean, cluster.spread), random.randrange(cluster.front_ends)
        now += random.expovariate(cluster.calls_per_second)


class Simulation:
    """Calls that `way` routes to replicas, each of which runs one call after the other."""

    def __init__(self, cluster: Cluster, way: Way) -> None:
        self._cluster = cluster
        self._routers = way.routers(cluster, Random(SEED))
        self._rule = way.rule
        self._free_at = [0.0] * cluster.replicas
        self._lost = range(0)
        self._running: list[tuple[float, int, Running]] = []  # a heap, by end
        self._numbers = count()
        detected = cluster.loss + cluster.detection
        self._planned = deque([(cluster.loss, self._lose_node), (detected, self._detect_loss)])
        self.outcome = Outcome()

    def advance(self, now: float) -> None:
        """Let everything happen that is due until `now`."""
        while self._planned and self._planned[0][0] <= now:
            due, happen = self._planned.popleft()
            self._end_calls(due)
            happen()
        self._end_calls(now)

    def arrive(self, now: float, service: float, front_end: int) -> None:
        self._begin(now, now, service, self._routers[front_end])

    def _begin(self, now: float, arrived: float, service: float, router: Router) -> None:
        position = self._rule(router)
        router.began(position)
        replica = router.replicas[position]
        ends = self._free_at[replica] = max(now, self._free_at[replica]) + service
        if replica in self._lost:
            ends = math.inf
        call = Running(ends, arrived, service, router, position)
        heappush(self._running, (ends, next(self._numbers), call))

    def _end_calls(self, now: float) -> None:
        cluster, outcome = self._cluster, self.outcome
        while self._running and self._running[0][0] <= now:
            call = heappop(self._running)[2]
            call.router.ended(call.position)
            outcome.done += 1
            if cluster.warm_up <= call.arrived < cluster.loss:
                outcome.waits.append(max(0.0, call.ends - call.service - call.arrived))

    def _lose_node(self) -> None:
        """Calls on the first node do not end any more."""
        self._lost = range(self._cluster.per_node)
        self._running = [
            (math.inf if call.replica in self._lost else ends, number, call)
            for ends, number, call in self._running
        ]
        heapify(self._running)

    def _detect_loss(self) -> None:
        """Send the calls of the lost node elsewhere."""
        calls = [call for _, _, call in self._running]
        self._running = [one for one in self._running if one[2].replica not in self._lost]
        heapify(self._running)
        for router in {id(router): router for router in self._routers}.values():
            router.remove(self._lost)
        hung = [call for call in calls if call.replica in self._lost]
        for call in hung:
            now = self._cluster.loss + self._cluster.detection
            self._begin(now, call.arrived, call.service, call.router)
        self.outcome.hung = len(hung)


def simulate(cluster: Cluster, way: Way) -> Outcome:
    """Route the calls of some seconds. The calls are the same for every way."""
    simulation = Simulation(cluster, way)
    for now, service, front_end in arrivals(cluster, Random(SEED + 1)):
        simulation.advance(now)
        simulation.arrive(now, service, front_end)
    simulation.advance(math.inf)
    simulation.outcome.waits.sort()
    return simulation.outcome


def simulate_all(
    cluster: Cluster,
) -> tuple[dict[Way, Outcome], dict[Way, dict[int, float]]]:
    """The outcome of each way, and some ways' p99 of the wait by the number of front ends."""
    steady = replace(cluster, warm_up=1.0, loss=5.0, detection=0.0)
    compared = [number for number in FRONT_ENDS if number <= cluster.replicas]
    runs = [(cluster, way) for way in WAYS]
    runs += [(replace(steady, front_ends=number), way) for way in COMPARED for number in compared]
    # Python code: threads would take turns. A worker process per core does not.
    with aiopar.ProcessExecutor(["cpu"] * torch.get_num_threads()) as executor:
        outcomes = iter(list(executor.map(simulate, *zip(*runs, strict=True))))
    by_way = {way: next(outcomes) for way in WAYS}
    by_number = {
        way: {number: next(outcomes).wait(0.99) for number in compared} for way in COMPARED
    }
    return by_way, by_number


def plot(by_way: dict[Way, Outcome], by_number: dict[Way, dict[int, float]], path: Path) -> None:
    # Here, because the worker processes import this module, and draw nothing.
    from matplotlib import pyplot

    figure, (tails, numbers, losses) = pyplot.subplots(
        1, 3, figsize=(15, 4.5), layout="constrained"
    )
    colors = {way: f"C{index}" for index, way in enumerate(WAYS)}
    shares = [0.5 * 0.9**index for index in range(60)]
    for way, outcome in by_way.items():
        waits = [1000 * outcome.wait(1 - share) for share in shares]
        tails.plot(waits, [100 * share for share in shares], color=colors[way], label=way.name)
    tails.set(title="Calls that wait longer, %", xlabel="wait for the replica, ms", yscale="log")
    tails.legend(loc="upper right")
    for way, waits_of in by_number.items():
        waits = [1000 * wait for wait in waits_of.values()]
        numbers.plot(range(len(waits)), waits, "o-", color=colors[way], label=way.name)
    numbers.set(title="p99 of the wait, ms", xlabel="front ends")
    numbers.set_xticks(range(len(waits)), [str(number) for number in waits_of])
    numbers.legend(loc="upper left")
    names = [way.name for way in by_way]
    losses.barh(names, [one.hung for one in by_way.values()], color=[*colors.values()])
    losses.invert_yaxis()
    losses.set(title="Calls that hang on a lost node")
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    cluster = Cluster(
        replicas=args.replicas,
        front_ends=args.front_ends,
        load=args.load,
        detection=args.detection,
    )
    by_way, by_number = simulate_all(cluster)
    print(
        f"{cluster.replicas} replicas, {cluster.per_node} per node, {cluster.load:.0%} busy; "
        f"{cluster.calls_per_second:.0f} calls per second through {cluster.front_ends} front ends; "
        f"a call takes {1000 * cluster.service:.0f} ms on average"
    )
    print(
        f"\n{'wait for the replica, ms':32}{'p50':>8}{'p99':>8}{'p99.9':>8}   hung on a lost node"
    )
    for way, outcome in by_way.items():
        waits = "".join(f"{1000 * outcome.wait(part):8.0f}" for part in (0.5, 0.99, 0.999))
        print(f"{way.name:32}{waits}{outcome.hung:21}")
    plot(by_way, by_number, args.plot)
    print(f"\nThe plot is in {args.plot}.")


def parse(argv: list[str] | None) -> argparse.Namespace:
    default = Cluster()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=default.replicas)
    parser.add_argument("--front-ends", type=int, default=default.front_ends)
    parser.add_argument("--load", type=float, default=default.load, help="from 0 to 1")
    parser.add_argument("--detection", type=float, default=default.detection, help="seconds")
    parser.add_argument("--plot", type=Path, default=Path("routing_simulation.png"))
    args = parser.parse_args(argv)
    if args.replicas <= default.per_node:
        least = default.per_node + 1
        parser.error(f"argument --replicas: expected at least {least}, got {args.replicas}")
    if not 1 <= args.front_ends <= args.replicas // default.per_node:
        most = args.replicas // default.per_node
        parser.error(f"argument --front-ends: expected 1 to {most}, got {args.front_ends}")
    if not 0 < args.load < 1:
        parser.error(f"argument --load: expected more than 0 and less than 1, got {args.load}")
    if args.detection < 0:
        parser.error(f"argument --detection: expected at least 0, got {args.detection}")
    return args


if __name__ == "__main__":
    main()
