# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The trial's report in Markdown."""

from __future__ import annotations


def table(head, rows):
    """Return a Markdown table (list of lines)."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def outcome(case):
    """Return in words how a case went."""
    words = []
    if case.get("came_up_s"):
        words.append("up after {came_up_s} s".format(**case))
    acceptance = (case.get("proof") or {}).get("acceptance") or {}
    if acceptance.get("length") is not None:
        words.append("acceptance {length}".format(**acceptance))
    if acceptance.get("tokens_per_s") is not None:
        words.append("{tokens_per_s} tokens/s".format(**acceptance))
    if case.get("killed"):
        words.append("{killed} killed".format(**case))
    if case.get("ended_s"):
        seconds = case.get("end_took_s")
        after = f"{seconds} s later" if seconds is not None else "after {ended_s} s".format(**case)
        words.append("status {status} {}".format(after, **case))
    if case.get("freed_s"):
        words.append("the GPUs' memory free {freed_s} s later".format(**case))
    if case.get("hung_in"):
        words.append("neither up nor dead, " + case["hung_in"])
    return ", ".join(words)


def markdown(report):
    """Return the report as Markdown."""
    known = report.get("machine") or {}
    gpus = known.get("gpus") or []
    lines = [f"# GPU trial, TP={report['tp']}, {report['date']}", ""]
    if gpus:
        driver = (report.get("facts") or {}).get("driver") or {}
        lines += [
            f"{len(gpus)} x {gpus[0]['name']}, driver {driver.get('module_version')}, "
            f"Python {known['python']}, {report.get('engine', 'torch ' + known['torch'])}; "
            f"{report['seconds']} s in all.",
            "",
        ]
    rows = [
        [
            case["name"],
            case["what"],
            case.get("by", ""),
            outcome(case),
            ", ".join(entry["id"] for entry in case.get("diagnoses", [])),
            "; ".join(case["problems"]) or "as it must be",
        ]
        for case in report["cases"]
    ]
    lines += table(["case", "what", "by", "outcome", "diagnosed", "judged"], rows)
    if report["skipped"]:
        lines += ["", "Not run for lack of time: " + ", ".join(report["skipped"]) + "."]
    if report["problems"]:
        lines += ["", *("- " + problem for problem in report["problems"])]
    if report.get("load"):
        lines += ["", *load_table(report["load"])]
    return "\n".join(lines) + "\n"


def load_table(load):
    """Return the table of loads against the plain read (list of lines)."""
    readings = {}
    for row in load["rows"]:
        readings.setdefault((row["what"], row["cold"]), []).append(row["seconds"])
    means = {key: sum(seconds) / len(seconds) for key, seconds in readings.items()}
    plain = means.get(("plain read", True))
    rows = []
    for (what, cold), seconds in readings.items():
        ratio = f"{means[what, cold] / plain:.2f}" if plain else ""
        rows.append([what, "cold" if cold else "warm", ", ".join(map(str, seconds)), ratio])
    head = [
        "read or load of {gib:.1f} GiB in {files} files".format(**load),
        "page cache",
        "s",
        "x plain cold read",
    ]
    return table(head, rows)
