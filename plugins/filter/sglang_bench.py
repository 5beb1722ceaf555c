# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Draw what the benchmark measured: one HTML page that needs nothing but itself."""

from __future__ import annotations

from html import escape

# Told apart by people who do not see all colours (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 42
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
figure { display: inline-block; margin: 0 1rem 1.5rem 0; } figcaption { font-weight: 600; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0 0 1.5rem; }
caption { text-align: left; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.key { border-top: 3px solid; display: inline-block; margin-right: .5em; vertical-align: middle; width: 2em }
"""


def nice_steps(top, wanted=5):
    """Return round numbers from 0 to at least `top`, about as many as wanted."""
    if top <= 0:
        return [0, 1]
    rough, power = top / wanted, 1.0
    while power * 10 <= rough:
        power *= 10
    while power > rough:
        power /= 10
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    steps = [0.0]
    while steps[-1] < top:
        steps.append(round(steps[-1] + step, 10))
    return steps


def said(number):
    """A number for people: no more digits than it deserves."""
    if number is None:
        return "-"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def chart(title, unit, series, places):
    """Return a figure of lines over concurrency.

    series: [(colour, dashes, label, {concurrency: value})]; places: the concurrencies, evenly on their axis.
    """
    values = [value for *_style, points in series for value in points.values()]
    if not values:
        return ""
    steps = nice_steps(max(values))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at_x(place):
        return LEFT + inner_width * (places.index(place) + 0.5) / len(places)

    def at_y(value):
        return TOP + inner_height * (1 - value / steps[-1])

    parts = [
        f'<figure><figcaption>{escape(title)}</figcaption><svg width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    ]
    for step in steps:
        y = at_y(step)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{said(step)}</text>')
    for place in places:
        parts.append(
            f'<text x="{at_x(place):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{place}</text>'
        )
    parts.append(
        f'<text x="{LEFT + inner_width / 2}" y="{HEIGHT - 6}" text-anchor="middle">requests at once</text>'
        f'<text x="12" y="{TOP + inner_height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 12 {TOP + inner_height / 2})">{escape(unit)}</text>'
    )
    for colour, dashes, label, points in series:
        line = " ".join(f"{at_x(place):.1f},{at_y(points[place]):.1f}" for place in places if place in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashed}>'
            f"<title>{escape(label)}</title></polyline>"
        )
        for place, value in points.items():
            parts.append(
                f'<circle cx="{at_x(place):.1f}" cy="{at_y(value):.1f}" r="3" fill="{colour}">'
                f"<title>{escape(label)}, {place} at once: {said(value)} {escape(unit)}</title></circle>"
            )
    return "".join(parts) + "</svg></figure>"


def name_of(record):
    """What a measurement is called."""
    speculation = "" if record["speculation"] else ", without speculation"
    return f"{record['release']}{speculation}, {record['at'][:16].replace('T', ' ')}"


def points_of(record, get):
    found = {run["concurrency"]: get(run) for run in record["runs"]}
    return {place: value for place, value in found.items() if value is not None}


def table(record):
    """Return the figures of one measurement as a table."""
    heads = ["requests at once", "answered", "tokens/s", "requests/s", "accepted a step"]
    heads += [
        f"{what} {part}, ms" for what in ("first token", "next token", "whole") for part in ("p50", "p95")
    ]
    rows = []
    for run in record["runs"]:
        cells = [str(run["concurrency"]), f"{run['completed']} of {run['requests']}"]
        cells += [said(run[name]) for name in ("output_tokens_per_s", "request_throughput", "accept_length")]
        for latency in ("ttft_ms", "itl_ms", "e2e_latency_ms"):
            cells += [said(run[latency].get(part)) for part in ("median", "p95")]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    caption = f"{name_of(record)}: {record['url']}, answers of {record['output_tokens']} tokens"
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{''.join(rows)}</table>"


def report(records):
    """Return the HTML page (str) of measurements (list of what the role keeps in bench-<time>.json).

    The newest of a server that speculates comes first and is drawn with its percentiles, then the others, the
    newest first, as many as can be told apart.
    """
    if not records:
        raise ValueError("there are no measurements to draw")
    records = sorted(records, key=lambda record: record["at"], reverse=True)
    main = next((record for record in records if record["speculation"]), records[0])
    records = [main, *(record for record in records if record is not main)][: len(COLOURS)]
    places = sorted({run["concurrency"] for record in records for run in record["runs"]})
    styled = list(zip(records, COLOURS))

    def lines(get, dashes="", suffix=""):
        return [
            (colour, dashes, name_of(record) + suffix, points_of(record, get)) for record, colour in styled
        ]

    def percentiles(latency):
        found = lines(lambda run: run[latency].get("p95"), "", ", p95")
        found += [
            (
                COLOURS[0],
                dashes,
                f"{name_of(records[0])}, {part}",
                points_of(records[0], lambda run, p=key: run[latency].get(p)),
            )
            for key, part, dashes in (("median", "p50", "2 4"), ("p99", "p99", "8 4"))
        ]
        return [line for line in found if line[3]]

    keys = "".join(
        f'<div><span class="key" style="border-color: {colour}"></span>{escape(name_of(record))}</div>'
        for record, colour in styled
    )
    charts = [
        chart(
            "Throughput", "generated tokens a second", lines(lambda run: run["output_tokens_per_s"]), places
        ),
        chart(
            "Acceptance length",
            "tokens a verify step",
            [line for line in lines(lambda run: run["accept_length"]) if line[3]],
            places,
        ),
        chart("Time to the first token", "ms", percentiles("ttft_ms"), places),
        chart("Time between tokens", "ms", percentiles("itl_ms"), places),
        chart("Time of a whole answer", "ms", percentiles("e2e_latency_ms"), places),
    ]
    unanswered = sum(run["requests"] - run["completed"] for run in records[0]["runs"])
    warning = f"<p><strong>{unanswered} requests were not answered.</strong></p>" if unanswered else ""
    title = f"Benchmark of {records[0]['host']}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{warning}{keys}"
        "<p>Latencies are at the 95th percentile; of the first measurement also at the 50th (dotted) "
        "and the 99th (dashed).</p>"
        f"{''.join(charts)}<h2>Figures</h2>{''.join(table(record) for record in records)}</body></html>\n"
    )


class FilterModule:
    """Filters of the role sglang_bench."""

    def filters(self):
        return {"sglang_bench_report": report}
