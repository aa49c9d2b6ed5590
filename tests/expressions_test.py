#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every PromQL expression of alerts, dashboards and autoscalers names only metrics that the server
exports, as docs/metrics.md lists them; tests/server holds that page against a server.

    tests/expressions_test.py
    tests/expressions_test.py --prometheus http://127.0.0.1:9090    also has it run them all
"""

import json
import pathlib
import re
import sys
import unittest
import urllib.error
import urllib.parse
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"

MATCHING = "by|without|on|ignoring|group_left|group_right"
KEYWORDS = {*MATCHING.split("|"), "and", "or", "unless", "bool", "offset", "inf", "nan"}
OF_PROMETHEUS = {"up"}
ALL_MODELS = "Process, all models"  # the dashboard's row for what has no model


def exported(page):
    """The names of all series that a page like docs/metrics.md lists."""
    names = set()
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE):
        names.add(name)
        if kind == "histogram":
            names |= {name + suffix for suffix in ("_bucket", "_sum", "_count")}
    return names


def with_model(page):
    """The names of the metrics that have the label `model`."""
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*) \|", page, re.MULTILINE)
    return {name for name, labels in rows if "model" in labels.replace(" ", "").split(",")}


def unfiltered(expression, names):
    """Those of the metrics `names` that an expression reads without model=~"$model"."""
    if expression.startswith("label_values("):
        return set()
    selectors = re.findall(r'\b([A-Za-z_:][\w:]*)(\{(?:[^}"]|"[^"]*")*\})?', expression)
    return {
        name for name, filters in selectors
        if re.sub(r"_(bucket|sum|count)$", "", name) in names and 'model=~"$model"' not in filters
    }


def metrics_of(expression):
    """The names of the metrics that a PromQL expression reads."""
    variable = re.match(r"\s*label_values\((.*),\s*\w+\s*\)\s*$", expression)  # Grafana's own
    text = variable[1] if variable else expression
    text = re.sub(r'"[^"]*"', "", text)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(rf"\b({MATCHING})\s*\([^)]*\)", "", text)
    names = re.findall(r"(?<![\w:$.])([A-Za-z_:][\w:]*)\b(?!\s*\()", text)
    return {name for name in names if name.lower() not in KEYWORDS}


def misplaced(panels, names):
    """Titles of the panels that belong on the other side of the row ALL_MODELS: above it every panel
    filters a metric of `names` by model, below it no panel could."""
    found, below = [], False
    for panel in panels:
        if panel["type"] == "row":
            below = panel["title"] == ALL_MODELS
            continue
        read = {name for target in panel["targets"] for name in metrics_of(target["expr"])}
        could = any(re.sub(r"_(bucket|sum|count)$", "", name) in names for name in read)
        if could == below:
            found.append(panel["title"])
    return found


def find(value, keys):
    """Strings under any of `keys`, however deep."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in keys and isinstance(inner, str):
                yield inner
            else:
                yield from find(inner, keys)
    elif isinstance(value, list):
        for inner in value:
            yield from find(inner, keys)


def expressions():
    """(where, PromQL) of everything that is shipped."""
    deploy = ROOT / "deploy"
    for file in sorted((deploy / "grafana").glob("*.json")):
        for text in find(json.loads(file.read_text(encoding="utf-8")), {"expr", "definition"}):
            yield file.name, text
    for file in [deploy / "prometheus" / "rules.yml", *sorted((deploy / "k8s").rglob("*.yaml"))]:
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            for text in find(document, {"expr", "query", "seriesQuery"}):
                yield file.relative_to(ROOT).as_posix(), text


def substitute(expression):
    """With values for Grafana's variables."""
    for name, value in {"$__rate_interval": "1m", "$__range": "1h"}.items():
        expression = expression.replace(name, value)
    return re.sub(r"\$\w+", ".*", expression)


class Expressions(unittest.TestCase):
    def test_name_exported_metrics(self):
        names = exported(PAGE.read_text(encoding="utf-8")) | OF_PROMETHEUS
        self.assertIn("denoised_queue_seconds_bucket", names)
        found = list(expressions())
        self.assertGreater(len(found), 20, "the expressions were not found")
        for where, expression in found:
            read = metrics_of(expression)
            self.assertTrue(read, f"{where}: {expression}: reads no metric")
            unknown = sorted(read - names)
            self.assertEqual(unknown, [], f"{where}: {expression}: not in docs/metrics.md")

    def test_the_dashboard_filters_by_model(self):
        names = with_model(PAGE.read_text(encoding="utf-8"))
        self.assertIn("denoised_queue_seconds", names)
        for where, expression in expressions():
            if where == "denoised.json":
                self.assertEqual(unfiltered(expression, names), set(), expression)

    def test_only_panels_without_a_model_stand_under_the_row_for_all_models(self):
        names = with_model(PAGE.read_text(encoding="utf-8"))
        dashboard = json.loads((ROOT / "deploy/grafana/denoised.json").read_text(encoding="utf-8"))
        self.assertIn(ALL_MODELS, [panel["title"] for panel in dashboard["panels"]])
        self.assertEqual(misplaced(dashboard["panels"], names), [])

    def test_misplaced_panels_are_caught(self):
        row = {"type": "row", "title": ALL_MODELS}
        x, y = ({"type": "stat", "title": name, "targets": [{"expr": f"rate({name}[1m])"}]}
                for name in ("x_sum", "y"))
        self.assertEqual(misplaced([x, row, y], {"x"}), [])
        self.assertEqual(misplaced([y, row, x], {"x"}), ["y", "x_sum"])

    def test_missing_filters_are_caught(self):
        names = with_model("| `x_seconds` | histogram | model, version | |\n| `y` | gauge | | |")
        self.assertEqual(names, {"x_seconds"})
        good = 'sum(rate(x_seconds_sum{model=~"$model"}[5m])) / y'
        self.assertEqual(unfiltered(good, names), set())
        self.assertEqual(unfiltered(good + ' + x_seconds_count{a="model"}', names),
                         {"x_seconds_count"})

    def test_every_alert_has_a_runbook(self):
        rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8"))
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            self.assertGreater(len(rule["annotations"]["runbook"]), 80, rule["alert"])

    def test_metrics_are_recognised(self):
        for expression, names in [
            ("up", {"up"}),
            ('sum by (le) (rate(a_bucket{x="b_c"}[5m])) / on (i) c offset 5m', {"a_bucket", "c"}),
            ("a unless on(instance) b > 0", {"a", "b"}),
            ("histogram_quantile(.9, sum(rate(q_bucket[$__range])) by (le))", {"q_bucket"}),
            ('label_values(state{job="$job"}, model)', {"state"}),
            ("time() - p > 1e3", {"p"}),
        ]:
            self.assertEqual(metrics_of(expression), names, expression)

    def test_planted_names_are_caught(self):
        names = exported("| `x_seconds` | histogram | | |\n| `y` | gauge | | |")
        self.assertEqual(metrics_of("rate(x_seconds_bucket[1m]) > y") - names, set())
        self.assertEqual(metrics_of("rate(z_total[1m])") - names, {"z_total"})
        self.assertEqual(metrics_of("y_bucket") - names, {"y_bucket"})


def run_on(prometheus):
    """Has a Prometheus evaluate every expression. The number of those that it refuses."""
    refused = answered = total = 0
    for where, expression in expressions():
        if expression.startswith("label_values("):
            continue
        total += 1
        query = urllib.parse.urlencode({"query": substitute(expression)})
        try:
            with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=10) as reply:
                answered += bool(json.load(reply)["data"]["result"])
        except urllib.error.HTTPError as error:
            refused += 1
            print(f"{where}: {expression}: {json.load(error)['error']}", file=sys.stderr)
    print(f"{total} expressions: {answered} with a result, {refused} refused")
    return refused


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--prometheus":
        sys.exit(run_on(sys.argv[2]) > 0)
    unittest.main()
