"""The alert rules for Prometheus: their expressions name metrics and labels of a real service."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from .promql import DEPLOY, check_query, parts, scraped

FILE = DEPLOY / "alerts.yaml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
]
GUIDE = DEPLOY.parents[1].joinpath("docs", "guides", "operations.md").read_text()
PROMTOOL = shutil.which("promtool")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_rule_names_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    query = promql_parser.parse(rule["expr"])
    grouped = check_query(query)
    assert rule["for"]
    texts = rule["annotations"]
    assert texts.keys() == {"summary", "description"}
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values())))
    # Without an aggregate a sample keeps all its labels.
    if parts(query, promql_parser.AggregateExpr):
        assert used <= grouped
    else:
        [selector] = parts(query, promql_parser.VectorSelector)
        assert used <= scraped()[str(selector.name)].keys()


def test_each_alert_is_explained_in_the_guide() -> None:
    named = set(re.findall(r"`(Aiopar\w+)`", GUIDE))
    assert named == {rule["alert"] for rule in RULES}


def test_the_rule_that_the_guide_shows_is_in_the_file() -> None:
    [block] = re.findall(r"^```yaml\n(- alert:.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    [shown] = yaml.safe_load(block)
    assert any(shown.items() <= rule.items() for rule in RULES)


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Prometheus")
@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", FILE), ("test", "rules", Path(__file__).with_name("alerts_test.yaml"))],
    ids=["check", "test"],
)
def test_promtool_accepts_the_rules_and_they_fire(arguments: tuple[str | Path, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
