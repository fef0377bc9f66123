"""The Grafana dashboard: its queries name metrics and labels of a real service."""

import json
import re
from typing import Any, NamedTuple

import promql_parser
import pytest

from .promql import DEPLOY, check_query, check_selector, parts, scraped

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())


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


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.text)
def test_each_query_names_metrics_and_labels_that_exist(query: Query) -> None:
    assert query.legend <= check_query(promql_parser.parse(query.text))


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable["name"])
def test_each_variable_has_the_values_of_a_label_that_exists(
    variable: dict[str, Any],
) -> None:
    query = variable["query"]["query"]
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", _sent(query))
    assert found is not None, query
    selector = promql_parser.parse(found[1])
    assert isinstance(selector, promql_parser.VectorSelector)
    check_selector(selector)
    assert selector.name is not None
    assert found[2] in scraped()[selector.name]
    assert variable["name"] == found[2]


def test_variables_of_queries_are_defined() -> None:
    defined = {one["name"] for one in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) <= defined


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {
        selector.name
        for query in QUERIES
        for selector in parts(promql_parser.parse(query.text), promql_parser.VectorSelector)
    }

    def family(name: str) -> str:
        return re.sub("_(bucket|sum|count)$", "", name)

    assert {family(name) for name in shown if name} == {family(name) for name in scraped()}
