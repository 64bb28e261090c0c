"""`write_report`: everything that was measured, on one HTML page that needs no network and no other file."""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from refplan._version import __version__
from refplan.errors import RefplanError
from refplan.files import write_text
from refplan.provenance import provenance as provenance_now
from refplan.report.explorer import payload
from refplan.report.gain import find_entries, find_gains, headline, headline_gain, rank_of
from refplan.report.gather import Found, gather
from refplan.report.html import section
from refplan.report.judgement import judgements
from refplan.report.sections import curves, gains_table, problems, provenance, results, summary

ASSETS = Path(__file__).parent / "assets"


def write_report(sources: Sequence[str | Path], out: str | Path, title: str | None = None) -> Path:
    """Write the report on run folders, folders of them, or single result files to `out` (.html)."""
    out = Path(out)
    if out.suffix not in (".html", ".htm"):
        raise RefplanError(f"{out}: the report is an HTML page; use a name ending in .html.")
    write_text(out, build_page(gather(sources), title or _title(sources)))
    return out


def _title(sources: Sequence[str | Path]) -> str:
    return ", ".join(Path(source).resolve().name for source in sources)


def build_page(found: Found, title: str) -> str:
    """The whole page as text."""
    entries = find_entries(found.evaluations)
    gains = find_gains(entries)
    chosen = headline_gain(gains)
    made = provenance_now()
    judged = judgements(found.judgements, found.problems)
    recordings = _recordings(found)
    parts = [
        summary(found, entries),
        problems(found),
        gains_table(gains),
        results(found.evaluations, entries),
        asset("explorer.html").replace("{{options}}", _options(recordings)) if recordings else _no_recording(),
        judged,
        curves(found.trainings),
        provenance(found, made),
    ]
    body = "".join(parts)
    values = {
        "title": escape(title),
        "version": escape(__version__),
        "style": asset("page.css"),
        "script": asset("page.js") + asset("explorer.js"),
        "links": _links(body),
        "verdict": chosen.verdict if chosen else "unclear",
        "headline": escape(headline(entries, gains)),
        "body": body,
        "made": escape(str(made["made"])),
        # In a script element only "<" could end it early.
        "recordings": json.dumps(recordings, allow_nan=False).replace("<", "\\u003c"),
    }
    return fill_page(values)


def fill_page(values: dict[str, str]) -> str:
    """The template of every page, with its places filled."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], asset("page.html"))


def asset(name: str) -> str:
    """A style sheet, script or template that pages are made of."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _links(body: str) -> str:
    """The sections that are there, as links."""
    found = re.findall(r'<section id="(\w+)"><h2>([^<]+)</h2>', body)
    return "".join(f'<a href="#{name}">{title}</a>' for name, title in found)


def _recordings(found: Found) -> list[dict[str, Any]]:
    made = []
    for name, recording in found.recordings.items():
        try:
            made.append(payload(name, recording))
        except (KeyError, IndexError, TypeError, ValueError) as problem:
            found.problems.append(f"{name}: the recording cannot be shown ({problem}); record it again.")
    return sorted(made, key=lambda each: rank_of(each["about"]["planner"]), reverse=True)  # the paper's method first


def _options(recordings: list[dict[str, Any]]) -> str:
    return "".join(f'<option value="{n}">{escape(each["title"])}</option>' for n, each in enumerate(recordings))


def _no_recording() -> str:
    lead = "No episode was recorded. Add --record RUN to refplan evaluate, and make the report again."
    return section("explorer_none", "Episode explorer", "", lead)
