"""The files for Prometheus and Grafana, and the page about them, name the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rpcdataloader.status.report import METRICS, as_metrics
from tests.unit.test_status_report import WAITING, look_at

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
TEXT = as_metrics(look_at(WAITING), 0)
LABELS = {
    name: re.findall(r"[{,](\w+)=", line)
    for name in METRICS
    for line in TEXT.splitlines()
    if re.match(rf"{name}[{{ ]", line)
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus"
)


def names_in(text):
    return set(re.findall(r"rpcdataloader_\w+", text))


def labels_in(expression):
    """Names of labels in braces, in ``by (...)`` and in ``on (...)``."""
    chosen = re.findall(r"[{,]\s*(\w+)\s*=~?\s*\"", expression)
    grouped = [name for names in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression) for name in names.split(",")]
    return {name.strip() for name in chosen + grouped}


def expressions():
    """Every question to Prometheus, and how its answers are called."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"], " ".join(rule.get("annotations", {}).values()).replace("$labels.", "")


def test_page_has_every_metric_as_it_is():
    table = "".join(
        f"| `{name}` | {'counter' if name.endswith('_total') else 'gauge'} | {', '.join(LABELS[name])} | {meaning} |\n"
        for name, (meaning, _key) in METRICS.items()
    )
    assert f"| --- | --- | --- | --- |\n{table}\n" in (ROOT / "docs" / "status-reference.md").read_text()
    assert names_in((ROOT / "docs" / "status-reference.md").read_text()) == set(METRICS)


@pytest.mark.parametrize(("expression", "shown"), list(expressions()))
def test_questions_are_about_metrics_and_labels_that_there_are(expression, shown):
    assert names_in(expression) <= set(METRICS)
    known = {label for name in names_in(expression) for label in LABELS[name]} | {"job", "instance"}
    assert labels_in(expression) <= known
    assert set(re.findall(r"\{\{\s*(\w+)", shown)) - {"$value"} <= known
    for name in names_in(expression):
        is_counter = name.endswith("_total")
        assert bool(re.search(rf"\b(?:rate|increase)\({name}\b", expression)) == is_counter


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_prometheus_accepts_its_files(arguments):
    checked = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
