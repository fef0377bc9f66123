"""Helpers for tests of queries to Prometheus: they name metrics and labels that really exist."""

import asyncio
import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import promql_parser
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import aiopar
from aiopar.serve import PrometheusMetrics
from tests.serve.steppers import Counting

T = TypeVar("T")
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


async def _scraped() -> dict[str, dict[str, set[str]]]:
    registry = CollectorRegistry()
    pool = aiopar.ReplicaPool(nn.Linear(4, 2), ["cpu", "cpu"], name="tiny")
    async with pool, aiopar.Batcher(pool) as batcher:
        steps = aiopar.ContinuousBatcher(Counting(), name="steps")
        metrics = PrometheusMetrics(batcher, steps, pool, registry=registry)
        await batcher(torch.ones(4))
        text = generate_latest(registry).decode()
        metrics.close()
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # Prometheus adds the job and the instance.
            labels = found.setdefault(sample.name, {"job": {"embeddings"}, "instance": {"host"}})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


@cache
def scraped() -> dict[str, dict[str, set[str]]]:
    """Each sample in the metrics of batchers and a pool, with its labels and their values."""
    return asyncio.run(_scraped())


def parts(query: Any, kind: type[T]) -> list[T]:
    """The parts of a query that are of this kind."""
    found: list[T] = []

    def visit(part: Any) -> None:
        if isinstance(part, kind):
            found.append(part)

    promql_parser.walk(query, visit)
    return found


def check_selector(selector: promql_parser.VectorSelector) -> None:
    """Check that the metric has these labels, with such values."""
    assert selector.name is not None
    labels = scraped()[selector.name]
    for matcher in selector.matchers.matchers:
        # A regular expression may name several values.
        for wanted in matcher.value.split("|"):
            assert any(re.fullmatch(wanted, value) for value in labels[matcher.name]), wanted


def check_query(query: promql_parser.Expr) -> set[str]:
    """Check that metrics and labels exist; return the labels of the aggregates."""
    selectors = parts(query, promql_parser.VectorSelector)
    assert selectors
    for selector in selectors:
        check_selector(selector)
    grouped = set[str]()
    for aggregate in parts(query, promql_parser.AggregateExpr):
        labels = set(aggregate.modifier.labels if aggregate.modifier else ())
        for selector in parts(aggregate.expr, promql_parser.VectorSelector):
            assert selector.name is not None
            assert labels <= scraped()[selector.name].keys()
        grouped |= labels
    return grouped
