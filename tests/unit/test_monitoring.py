"""The files for Prometheus and Grafana, and the page about them, name the metrics that there are."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from rpcdataloader.status.report import METRICS, as_metrics
from tests.unit.test_status_metrics import WAITING, look

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
TEXT = as_metrics(look(WAITING), 0)
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
            yield rule["expr"], " ".join(rule["annotations"].values()).replace("$labels.", "")


def test_page_has_every_metric_as_it_is():
    table = "".join(
        f"| `{name}` | {'counter' if name.endswith('_total') else 'gauge'} | {', '.join(LABELS[name])} | {meaning} |\n"
        for name, (meaning, _key) in METRICS.items()
    )
    assert f"| --- | --- | --- | --- |\n{table}\n" in (ROOT / "docs" / "monitoring.md").read_text()
    assert names_in((ROOT / "docs" / "monitoring.md").read_text()) == set(METRICS)


@pytest.mark.parametrize(("expression", "shown"), list(expressions()))
def test_questions_are_about_metrics_and_labels_that_there_are(expression, shown):
    assert names_in(expression) <= set(METRICS)
    known = {label for name in names_in(expression) for label in LABELS[name]} | {"job", "instance"}
    assert labels_in(expression) <= known
    assert set(re.findall(r"\{\{\s*(\w+)", shown)) - {"$value"} <= known
    for name in names_in(expression):
        is_counter = name.endswith("_total")
        assert bool(re.search(rf"\b(?:rate|increase)\({name}\b", expression)) == is_counter


def test_dashboard_has_room_for_each_panel():
    taken, panels = set(), DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def model(required, **optional):
    """The schema of an object without other keys."""
    properties = {**required, **optional}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def listed(items, **more):
    return {"type": "array", "items": items, **more}


def one_of(*values):
    return {"enum": list(values)}


def text(pattern=""):
    return {"type": "string", "pattern": pattern}


def whole(lowest, highest):
    return {"type": "integer", "minimum": lowest, "maximum": highest}


# The used part of Grafana's model, of schema 39: kinds/dashboard/dashboard_kind.cue, and the models of both panels.
FLAG, NUMBER = {"type": "boolean"}, {"type": "number"}
TIME = text(r"^now(-\d+[smhdwMy])?$")
SOURCE = model({"type": one_of("prometheus"), "uid": text(r"^\$\{\w+\}$")})
STEP = model({"color": text("^[a-z]+$"), "value": {"type": ["number", "null"]}})
LINES = model(
    {},
    stacking=model({"mode": one_of("none", "normal", "percent")}),
    fillOpacity=whole(0, 100),
    lineInterpolation=one_of("linear", "smooth", "stepBefore", "stepAfter"),
)
FIELDS = {
    "min": NUMBER,
    "max": NUMBER,
    "thresholds": model({"mode": one_of("absolute", "percentage"), "steps": listed(STEP, minItems=1)}),
}
SUMMARY = model({"calcs": listed(one_of("lastNotNull", "last", "max", "mean")), "fields": text(), "values": FLAG})


def panel(kind, options, **fields):
    unit = one_of("percentunit", "short", "s", "bytes", "Bps")
    query = model({"refId": text("^[A-Z]$"), "datasource": SOURCE, "expr": text("."), "legendFormat": text()})
    return model(
        {
            "id": whole(1, 10**6),
            "type": one_of(kind),
            "title": text("."),
            "datasource": SOURCE,
            "gridPos": model({"x": whole(0, 23), "y": whole(0, 10**4), "w": whole(1, 24), "h": whole(1, 100)}),
            "targets": listed(query, minItems=1),
            "fieldConfig": model({"defaults": model({"unit": unit}, **FIELDS, **fields), "overrides": listed(False)}),
            "options": options,
        }
    )


MODEL = model(
    {
        "title": text("."),
        "uid": text(r"^[\w-]{1,40}$"),
        "schemaVersion": one_of(39),
        "version": whole(1, 2**31),
        "editable": FLAG,
        "tags": listed(text(".")),
        "time": model({"from": TIME, "to": TIME}),
        "refresh": text(r"^\d+[smhd]$"),
        "timezone": one_of("browser", "utc"),
        "annotations": model({"list": listed(False)}),
        "templating": model(
            {
                "list": listed(
                    model({"name": text(r"^\w+$"), "type": one_of("datasource"), "query": text(".")}, label=text())
                )
            }
        ),
        "panels": listed(
            {"oneOf": [panel("stat", model({"reduceOptions": SUMMARY})), panel("timeseries", model({}), custom=LINES)]}
        ),
    }
)


def test_dashboard_follows_the_model_of_grafana():
    jsonschema.validate(DASHBOARD, MODEL)
    names = {f"${{{variable['name']}}}" for variable in DASHBOARD["templating"]["list"]}
    parts = [part for panel in DASHBOARD["panels"] for part in (panel, *panel["targets"])]
    assert {part["datasource"]["uid"] for part in parts} <= names


ABSENT = object()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schemaVersion", "39"),
        ("refresh", 10),
        ("time", "now-1h"),
        ("time.from", "yesterday"),
        ("panel", []),
        ("templating.list.0.type", "source"),
        ("panels.0.type", "stats"),
        ("panels.0.datasource", "prometheus"),
        ("panels.0.datasource.uid", ABSENT),
        ("panels.0.targets", []),
        ("panels.0.targets.0.expr", ABSENT),
        ("panels.0.targets.0.expression", "up"),
        ("panels.0.targets.0.refId", 1),
        ("panels.0.gridPos.w", 25),
        ("panels.0.gridPos.h", "4"),
        ("panels.0.fieldConfig.defaults.unit", "percents"),
        ("panels.0.fieldConfig.defaults.unit", ABSENT),
        ("panels.0.fieldConfig.defaults.custom", {}),
        ("panels.4.options.reduceOptions", {}),
    ],
)
def test_mistake_in_a_dashboard_is_found(path, value):
    wrong = part = copy.deepcopy(DASHBOARD)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in parents:
        part = part[key]
    if value is ABSENT:
        del part[last]
    else:
        part[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, MODEL)


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
