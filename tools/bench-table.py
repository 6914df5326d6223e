#!/usr/bin/env python3
"""Prints the output of `glm bench … --json` as a table for docs/benchmarks.md.

usage: glm bench kernels --json | tools/bench-table.py
       glm bench model --model DIR --json | tools/bench-table.py
"""
import json
import sys

report = json.load(sys.stdin)
rows = report["rows"]
if not rows:
    sys.exit("no rows")
print(f"{report['cpu']}; glm {report['version'].split(',')[0]}\n")


def cell(value):
    if isinstance(value, dict):  # median, min, max
        return f"{value['median']} ({value['min']}–{value['max']})"
    return "–" if value is None else str(value)


keys = list(rows[0])
print("| " + " | ".join(keys) + " |")
print("|" + "---|" * len(keys))
for row in rows:
    print("| " + " | ".join(cell(row[k]) for k in keys) + " |")
