"""One experiment as files: Markdown, figure, and an HTML page that needs nothing else; all from its results.csv."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from refplan._version import __version__
from refplan.experiments.recipes import Recipe
from refplan.files import write_text
from refplan.report.html import code, figures, pairs, section, table, words
from refplan.report.page import asset, fill_page
from refplan.report.paper import Shown, make_tables
from refplan.report.paper_figures import draw_figure
from refplan.store import read_results


def draw(recipe: Recipe, folder: Path) -> list[Shown]:
    """Make everything anew from `folder/results.csv`; returns the tables for the terminal."""
    rows: list[dict[str, Any]] = list(read_results(folder / "results.csv"))
    tables = make_tables(recipe, rows)
    note = scale_words(rows)
    if rows:
        draw_figure(recipe, rows, note, folder / "figure.png", folder / "figure.svg")
    write_text(folder / "table.md", markdown(recipe, tables, note, bool(rows)))
    write_text(folder / "page.html", page(recipe, tables, rows, note, folder / "figure.svg"))
    return tables


def scale_words(rows: list[dict[str, Any]]) -> str:
    """At which scale the rows were made, and what that means."""
    said = dict.fromkeys(f"scale '{row['scale']}': {row['note']}" for row in rows if row.get("scale"))
    return "; ".join(said)


def markdown(recipe: Recipe, tables: list[Shown], note: str, has_figure: bool) -> str:
    """The tables as Markdown."""
    parts = [
        f"# {recipe.title}",
        recipe.about,
        f"*{note}.* Brackets: 95 % bootstrap intervals, drawn over seeds and over the episodes of each.",
    ]
    for each in tables:
        head = f"| {' | '.join(each.headings)} |\n|{' --- |' * len(each.headings)}"
        parts += [f"## {each.title}", head + "".join(f"\n| {' | '.join(line)} |" for line in each.lines)]
    parts += ["![figure](figure.svg)"] if has_figure else ["No cell has finished yet."]
    return "\n\n".join(parts) + "\n"


def page(recipe: Recipe, tables: list[Shown], rows: list[dict[str, Any]], note: str, picture: Path) -> str:
    """The same as one HTML page, the figure inside it."""
    parts = []
    if picture.is_file() and rows:
        svg = picture.read_text(encoding="utf-8")
        parts.append(section("figure", "Figure", f'<figure class="paper">{svg[svg.index("<svg") :]}</figure>'))
    for number, each in enumerate(tables):
        body = table(each.title, each.headings, [[words(line[0]), *map(_cell, line[1:])] for line in each.lines])
        parts.append(section(f"table{number}", each.title, body))
    parts.append(section("making", "How it was made", _making(rows)))
    lead = f"<p>{escape(recipe.about)}</p>"
    values = {
        "title": escape(recipe.title),
        "version": escape(__version__),
        "style": asset("page.css") + "figure.paper svg{max-width:100%;height:auto;background:#fff}",
        "script": asset("page.js"),
        "links": "",
        "verdict": "unclear",
        "headline": escape(note or "No cell has finished yet."),
        "body": lead + "".join(parts),
        "made": escape(max((str(row.get("made", "")) for row in rows), default="")),
        "recordings": "[]",
    }
    return fill_page(values)


def _cell(text: str) -> Any:
    """A number sorts by its value, words by their letters."""
    found = re.match(r"-?\d+(\.\d+)?", text)
    return figures(text, float(found[0])) if found else words(text)


def _making(rows: list[dict[str, Any]]) -> str:
    """Commands, commits and versions of the rows."""

    def said(name: str) -> str:
        return ", ".join(code(each) for each in dict.fromkeys(str(row.get(name, "")) for row in rows) if each)

    versions = {
        name: version for row in rows if row.get("versions") for name, version in json.loads(row["versions"]).items()
    }
    seconds = sum(float(row["wall_s"]) for row in rows if row.get("wall_s"))
    return pairs(
        [
            ("command", said("command")),
            ("commit", said("commit")),
            ("versions", escape(", ".join(f"{name} {version}" for name, version in versions.items()))),
            ("rows", str(len(rows))),
            ("seconds of evaluation", f"{seconds:.0f}"),
        ]
    )
