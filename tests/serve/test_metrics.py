"""`PrometheusMetrics`: scrapes of a real registry, in the text format."""

import sys
import time
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import aiopar
from aiopar import ContinuousBatcher
from aiopar.serve import Batcher, PrometheusMetrics, ReplicaPool
from aiopar.testing import Gate

from .batches import Bad, busy, outcomes_in, outcomes_of, until
from .replicas import Fragile, break_copy, held, in_service, open_pool
from .steppers import Counting, Item

pytestmark = pytest.mark.anyio


class Scrape:
    """One scrape of a registry, parsed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = generate_latest(registry).decode()
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }
        assert len(self._samples) == sum(len(family.samples) for family in self.families.values())

    def __call__(self, name: str, **labels: str) -> float:
        """The value of the sample with this name and these labels."""
        return self._samples[name, frozenset(labels.items())]

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The values of the samples with this name and these labels, by another label."""
        return {
            dict(found)[label]: value
            for (of, found), value in self._samples.items()
            if of == name and labels.items() <= dict(found).items()
        }


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


async def test_outcomes_of_requests_are_counted(registry: CollectorRegistry) -> None:
    async with busy(
        lambda item: item if item == "first" else 1 / item, name="fn", max_pending=2
    ) as callers:
        metrics = PrometheusMetrics(callers.batcher, registry=registry)
        with pytest.raises(aiopar.DeadlineExceeded):
            await callers.batcher(1, timeout=0.01)
        await callers.queue("left")
        callers.cancel("left")
        await until(lambda: callers.batcher.stats().queued == 0)
        await callers.queue(1, 0)
        with pytest.raises(aiopar.Overloaded):
            await callers.batcher(2)
        scrape = Scrape(registry)
        assert scrape("aiopar_batcher_queue_length", batcher="fn") == 2
        assert scrape("aiopar_batcher_in_flight", batcher="fn") == 1
        callers.gate.open()
        await until(lambda: {1, 0} <= callers.outcomes.keys())
    with pytest.raises(aiopar.ServiceClosed):
        await callers.batcher(2)
    scrape = Scrape(registry)
    assert scrape.by("aiopar_batcher_requests_total", "outcome", batcher="fn") == {
        "answered": 1,  # the item "first" was queued before the metrics
        "failed": 1,
        "refused": 2,
        "expired": 1,
        "cancelled": 1,
    }
    counted = {"answered": 2, "failed": 1, "refused": 2, "expired": 1, "cancelled": 1}
    assert outcomes_in(callers.batcher.stats()) == counted, 'and the item "first"'
    assert scrape.by("aiopar_batcher_refusals_total", "cause", batcher="fn") == {
        "queue_full": 1,
        "max_wait": 0,
        "max_batch_cost": 0,
        "invalid_input": 0,
        "unavailable": 0,
        "closed": 1,
    }
    assert scrape("aiopar_batcher_queue_length", batcher="fn") == 0
    assert scrape("aiopar_batcher_in_flight", batcher="fn") == 0
    assert scrape("aiopar_batcher_request_seconds_count", batcher="fn") == 1, "only answered ones"
    metrics.close()


async def test_histograms_of_items_and_batches(registry: CollectorRegistry) -> None:
    async with busy(name="fn", max_batch_size=2) as callers:
        PrometheusMetrics(callers.batcher, registry=registry)
        await callers.queue(1, 2, 3)
    scrape = Scrape(registry)
    stats = callers.batcher.stats()
    assert stats.batch_sizes == {1: 2, 2: 1}
    assert scrape("aiopar_batcher_batch_size_count", batcher="fn") == 3
    assert scrape("aiopar_batcher_batch_size_sum", batcher="fn") == 4
    sizes = scrape.by("aiopar_batcher_batch_size_bucket", "le", batcher="fn")
    assert [sizes[bound] for bound in ("1.0", "2.0", "4.0", "1024.0", "+Inf")] == [2, 3, 3, 3, 3]
    # The batch of the item "first" began before the metrics.
    assert scrape("aiopar_batcher_queue_wait_seconds_count", batcher="fn") == 3
    assert scrape("aiopar_batcher_compute_seconds_count", batcher="fn") == 2
    assert scrape("aiopar_batcher_request_seconds_count", batcher="fn") == 3
    request, wait = (
        scrape(f"aiopar_batcher_{name}_seconds_sum", batcher="fn")
        for name in ("request", "queue_wait")
    )
    assert request > wait, "a request waits, and then its batch runs"
    for name in ("request", "queue_wait", "compute"):
        assert scrape(f"aiopar_batcher_{name}_seconds_sum", batcher="fn") > 0
        counts = scrape.by(f"aiopar_batcher_{name}_seconds_bucket", "le", batcher="fn")
        assert list(counts.values()) == sorted(counts.values())
        bounds = [float(bound) for bound in counts]
        assert bounds == sorted(bounds)
        assert (bounds[0], bounds[-2]) == (0.0001, 10.0)


async def test_steps_of_a_continuous_batcher(registry: CollectorRegistry) -> None:
    gate = Gate()
    stepper = Counting(lambda _: gate())
    stepper.in_place["bad"] = Bad()
    batcher = ContinuousBatcher(stepper, name="steps", max_batch_size=2)
    with pytest.raises(ValueError, match="two of the batchers are called 'steps'"):
        PrometheusMetrics(batcher, Batcher(_double, name="steps"), registry=registry)
    async with batcher, held(gate) as tasks:
        metrics = PrometheusMetrics(batcher, registry=registry)
        tasks.start_soon(batcher, Item("long", 3))
        await gate.entered()
        tasks.start_soon(outcomes_of, batcher, [Item("good", 1), Item("bad")])
        await until(lambda: batcher.stats().queued == 2)
        scrape = Scrape(registry)
        assert scrape("aiopar_batcher_queue_length", batcher="steps") == 2
        assert scrape("aiopar_batcher_in_flight", batcher="steps") == 1
    stats = batcher.stats()
    assert (stats.answered, stats.failed) == (2, 1)
    assert stats.batch_sizes == {1: 1, 2: 2}
    scrape = Scrape(registry)
    outcomes = scrape.by("aiopar_batcher_requests_total", "outcome", batcher="steps")
    assert (outcomes["answered"], outcomes["failed"]) == (2, 1)
    assert scrape("aiopar_batcher_parts_total", batcher="steps") == stats.parts == 4
    assert scrape("aiopar_batcher_preemptions_total", batcher="steps") == 0
    for name, count in (
        ("request_seconds", 2),
        ("queue_wait_seconds", 3),
        ("batch_size", 3),
        ("compute_seconds", 3),
        ("first_part_seconds", 2),
        ("between_parts_seconds", 2),
    ):
        assert scrape(f"aiopar_batcher_{name}_count", batcher="steps") == count, name
        assert scrape(f"aiopar_batcher_{name}_sum", batcher="steps") > 0, name
    metrics.close()


async def test_models_of_a_store(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    def load(name: str) -> Batcher[Any, Any]:
        return Batcher(ReplicaPool(nn.Linear(2, len(name)), ["cpu"]))

    async with aiopar.ModelStore(load, max_models=1, name="all") as store:
        async with store.use("ab"):
            metrics = PrometheusMetrics(store, registry=registry)
        for name in ("ab", "abc"):
            async with store.use(name) as batcher:
                await batcher(torch.ones(2))
        with pytest.raises(TypeError):
            async with store.use(3):  # type: ignore[arg-type]  # not even a load
                pass
        scrape = Scrape(registry)
        assert scrape.by("aiopar_batcher_requests_total", "batcher", outcome="answered") == {
            "abc": 1
        }
        replicas = scrape.by("aiopar_replica_state", "pool", state="ready", replica="0")
        assert replicas == {"abc": 1}
        assert scrape.by("aiopar_store_loads_total", "outcome", store="all") == {
            "completed": 2,
            "failed": 0,
        }
        values = [scrape(f"aiopar_store_{one}", store="all") for one in ("models", "bytes")]
        assert (*values, scrape("aiopar_store_evictions_total", store="all")) == (1, 36, 1)
        # Another batcher has the name of a model: the model serves without metrics.
        metrics.add(Batcher(len, name="ab"))
        async with store.use("ab") as batcher:
            await batcher(torch.ones(2))
        assert "model 'ab' is not in the metrics" in caplog.text
        metrics.remove(store)
        async with store.use("abc"):
            assert Scrape(registry).by("aiopar_batcher_in_flight", "batcher") == {"ab": 0}


async def test_states_and_calls_of_replicas(registry: CollectorRegistry) -> None:
    gate, module = Gate(), Fragile()
    async with open_pool(module, warmup=torch.ones(1, 2), name="both") as pool:
        PrometheusMetrics(pool, registry=registry)

        def state(replica: int) -> list[str]:
            states = Scrape(registry).by(
                "aiopar_replica_state", "state", pool="both", replica=str(replica), device="cpu"
            )
            assert set(states) == {"ready", "rebuilding", "retired", "closed"}
            return [name for name, value in states.items() if value]

        assert [state(0), state(1)] == [["ready"], ["ready"]]
        break_copy(module, 0)
        module.on_call.append(gate)
        async with held(gate) as tasks:
            for _ in pool.devices:
                tasks.start_soon(pool, torch.ones(1, 2))
            await gate.entered(2)  # one per replica
        await until(lambda: in_service(pool) == [0, 1])
        scrape, stats = Scrape(registry), pool.stats().replicas
        for replica in stats:
            labels = {"pool": "both", "replica": str(replica.index), "device": "cpu"}
            assert scrape.by("aiopar_replica_calls_total", "outcome", **labels) == {
                "completed": replica.completed,
                "failed": replica.failed,
            }
            assert scrape("aiopar_replica_rebuilds_total", **labels) == replica.rebuilds
            assert scrape("aiopar_replica_in_flight", **labels) == 0
        assert (stats[0].failed, stats[0].rebuilds) == (1, 1)
    assert [state(0), state(1)] == [["closed"], ["closed"]]


async def test_each_worker_of_batchers_and_pools_is_counted_once(
    registry: CollectorRegistry,
) -> None:
    async with (
        aiopar.DeviceExecutor(["cpu"], thread_name_prefix="alone") as alone,
        aiopar.DeviceExecutor(["cpu", "cpu"], thread_name_prefix="both") as both,
    ):
        pool = ReplicaPool(nn.Linear(2, 2), executor=both)
        batcher = Batcher(pool)
        PrometheusMetrics(pool, batcher, alone, alone.on("cpu"), registry=registry)
        name = "aiopar_worker_busy_seconds_total"
        assert Scrape(registry).by(name, "executor") == {"alone": 0}, "the pool is not open yet"
        async with pool, batcher:
            await batcher(torch.ones(2))
            await alone.run_sync(torch.ones, 1000)
        scrape = Scrape(registry)
        for executor, prefix in ((alone, "alone"), (both, "both")):
            seconds = [stats.busy_seconds for stats in executor.stats().workers]
            told = scrape.by(name, "worker", executor=prefix, device="cpu")
            assert told == {str(index): each for index, each in enumerate(seconds)}
            assert max(seconds) > 0
            ratios = scrape.by("aiopar_worker_busy_ratio", "worker", executor=prefix, device="cpu")
            assert set(ratios) == set(told)
            assert all(0 <= ratio <= 1 for ratio in ratios.values())


def test_busy_ratio_is_the_busy_share_of_the_time_since_the_last_reading(
    registry: CollectorRegistry,
) -> None:
    def ratios() -> dict[str, float]:
        return Scrape(registry).by("aiopar_worker_busy_ratio", "worker")

    with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        PrometheusMetrics(executor, registry=registry)
        assert ratios() == {"0": 0, "1": 0}
        executor.on(worker=0).submit(time.sleep, 1.0).result()
        first = ratios()
        assert 0.5 < first["0"] <= 1
        assert first["1"] == 0
        assert ratios() == first, "less than a second after the last reading"


def test_seconds_of_the_present_call_show_a_stuck_worker(registry: CollectorRegistry) -> None:
    with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor, Gate() as gate:
        PrometheusMetrics(executor, registry=registry)
        executor.on(worker=0).submit(gate)
        gate.wait_entered()
        first, second = (
            Scrape(registry).by("aiopar_worker_call_seconds", "worker") for _ in range(2)
        )
        assert 0 < first["0"] < second["0"]
        assert first["1"] == second["1"] == 0


def test_executors_with_the_same_prefix_are_numbered(registry: CollectorRegistry) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as one, aiopar.DeviceExecutor(["cpu"]) as other:
        PrometheusMetrics(one, other, one, registry=registry)
        for _ in range(2):
            names = Scrape(registry).by("aiopar_worker_busy_seconds_total", "executor")
            assert set(names) == {"aiopar", "aiopar-2"}


def _double(batch: torch.Tensor) -> torch.Tensor:
    return batch * 2


def test_default_name_is_that_of_the_function_module_or_pool() -> None:
    pool = ReplicaPool(nn.Linear(2, 2), ["cpu"])
    assert pool.name == "Linear"
    assert [Batcher(_double).name, Batcher(nn.ReLU()).name] == ["_double", "ReLU"]
    assert [Batcher(pool).name, Batcher(pool, name="mine").name] == ["Linear", "mine"]
    assert ReplicaPool(nn.ReLU(), ["cpu"], name="mine").name == "mine"
    with pytest.raises(TypeError, match="name must be a str, not int"):
        Batcher(_double, name=1)  # type: ignore[call-overload]


def test_equal_names_are_refused(registry: CollectorRegistry) -> None:
    one, other = Batcher(_double), Batcher(_double)
    with pytest.raises(ValueError, match="two of the batchers are called '_double'"):
        PrometheusMetrics(one, other, registry=registry)
    PrometheusMetrics(one, one, ReplicaPool(nn.ReLU(), ["cpu"], name="_double"), registry=registry)


@pytest.mark.parametrize(
    ("resource", "given", "message"),
    [
        (None, {"registry": 5}, "must be a CollectorRegistry, not int"),
        (None, {"registry": CollectorRegistry}, "must be a CollectorRegistry, not the class"),
        (None, {"namespace": 5}, "namespace must be a str, not int"),
        # prometheus-client would replace the wrong characters by `_`.
        *((None, {"namespace": text}, "got ") for text in ("a b", "a-b", "1a", "\u00e9", "a\n")),
        (nn.ReLU(), {}, "expected a Batcher, a ContinuousBatcher, .* got ReLU"),
        (Batcher, {}, "got the class Batcher"),
    ],
)
def test_wrong_arguments_are_refused(
    registry: CollectorRegistry, resource: Any, given: Any, message: str
) -> None:
    with pytest.raises(ValueError if message == "got " else TypeError, match=message):
        PrometheusMetrics(*(resource,) * (resource is not None), **{"registry": registry, **given})
    assert Scrape(registry).families == {}


@pytest.mark.parametrize("given", [None, CollectorRegistry()], ids=["default", "own"])
def test_close_unregisters_the_metrics(given: CollectorRegistry | None) -> None:
    registry = REGISTRY if given is None else given
    before = set(Scrape(registry).families)
    batcher = Batcher(_double)
    metrics = PrometheusMetrics(batcher, registry=given, namespace="tests")
    with pytest.raises(ValueError, match=r"metrics of the namespace 'tests' already"):
        PrometheusMetrics(registry=given, namespace="tests")
    for _ in range(2):
        metrics.close()
    assert set(Scrape(registry).families) == before
    PrometheusMetrics(batcher, registry=given, namespace="tests").close()


def test_metrics_follow_the_conventions_and_are_documented(registry: CollectorRegistry) -> None:
    PrometheusMetrics(registry=registry, namespace="")
    families = Scrape(registry).families
    assert len(families) == 23
    for name, family in families.items():
        assert family.documentation.endswith("."), name
        assert not name.endswith("_total"), "the sample of a counter has this suffix"
        assert name.startswith(("batcher_", "replica_", "store_", "worker_"))
    documented = PrometheusMetrics.__doc__ or ""
    for name, family in families.items():
        written = f"{name}_total" if family.type == "counter" else name
        assert f"- `{written}` (" in documented


def test_without_prometheus_client_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # importing it fails
    with pytest.raises(ImportError, match=r"pip install 'aiopar\[metrics\]'"):
        PrometheusMetrics()
