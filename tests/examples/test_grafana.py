"""The Grafana dashboard: its queries name metrics and labels of a real service."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import promql_parser
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import aiopar
from aiopar.serve import PrometheusMetrics
from tests.serve.steppers import Counting

T = TypeVar("T")
DASHBOARD: dict[str, Any] = json.loads(
    Path(__file__).parents[2].joinpath("examples", "deploy", "grafana.json").read_text()
)


class Query(NamedTuple):
    """A query as Grafana sends it, and the labels that its legend shows."""

    text: str
    legend: set[str]


def _sent(text: str) -> str:
    """A query with Grafana's variables replaced, all values selected."""
    return re.sub(r"\$\w+", ".*", text.replace("$__rate_interval", "1m"))


QUERIES = [
    Query(_sent(target["expr"]), set(re.findall(r"{{(\w+)}}", target["legendFormat"])))
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
VARIABLES = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]


async def _scraped() -> dict[str, set[str]]:
    """The labels of each sample in the metrics of batchers and a pool."""
    registry = CollectorRegistry()
    pool = aiopar.ReplicaPool(nn.Linear(4, 2), ["cpu", "cpu"], name="tiny")
    async with pool, aiopar.Batcher(pool) as batcher:
        steps = aiopar.ContinuousBatcher(Counting(), name="steps")
        metrics = PrometheusMetrics(batcher, steps, pool, registry=registry)
        await batcher(torch.ones(4))
        text = generate_latest(registry).decode()
        metrics.close()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # Prometheus adds the job and the instance.
            labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return labels


@pytest.fixture(scope="module")
def scraped() -> dict[str, set[str]]:
    return asyncio.run(_scraped())


def _parts(query: Any, kind: type[T]) -> list[T]:
    """The parts of a query that are of this kind."""
    found: list[T] = []

    def visit(part: Any) -> None:
        if isinstance(part, kind):
            found.append(part)

    promql_parser.walk(query, visit)
    return found


def _check_selector(selector: promql_parser.VectorSelector, scraped: dict[str, set[str]]) -> None:
    assert selector.name in scraped
    matched = {matcher.name for matcher in selector.matchers.matchers}
    assert matched <= scraped[selector.name]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.text)
def test_each_query_names_metrics_and_labels_that_exist(
    query: Query, scraped: dict[str, set[str]]
) -> None:
    parsed = promql_parser.parse(query.text)
    selectors = _parts(parsed, promql_parser.VectorSelector)
    assert selectors
    for selector in selectors:
        _check_selector(selector, scraped)
    grouped = set[str]()
    for aggregate in _parts(parsed, promql_parser.AggregateExpr):
        labels = set(aggregate.modifier.labels if aggregate.modifier else ())
        for selector in _parts(aggregate.expr, promql_parser.VectorSelector):
            assert selector.name is not None
            assert labels <= scraped[selector.name]
        grouped |= labels
    assert query.legend <= grouped


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable["name"])
def test_each_variable_has_the_values_of_a_label_that_exists(
    variable: dict[str, Any], scraped: dict[str, set[str]]
) -> None:
    query = variable["query"]["query"]
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", _sent(query))
    assert found is not None, query
    selector = promql_parser.parse(found[1])
    assert isinstance(selector, promql_parser.VectorSelector)
    _check_selector(selector, scraped)
    assert selector.name is not None
    assert found[2] in scraped[selector.name]
    assert variable["name"] == found[2]


def test_variables_of_queries_are_defined() -> None:
    defined = {one["name"] for one in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) <= defined


def test_every_metric_is_on_the_dashboard(scraped: dict[str, set[str]]) -> None:
    shown = {
        selector.name
        for query in QUERIES
        for selector in _parts(promql_parser.parse(query.text), promql_parser.VectorSelector)
    }

    def family(name: str) -> str:
        return re.sub("_(bucket|sum|count)$", "", name)

    assert {family(name) for name in shown if name} == {family(name) for name in scraped}
