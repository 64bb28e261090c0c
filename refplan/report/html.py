"""Small pieces of HTML; everything that came from a file or a user is escaped here."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

UNKNOWN = "\N{EN DASH}"  # stands where a value is missing
MINUS = "\N{MINUS SIGN}"


Number = float | int


class Cell(NamedTuple):
    """A table cell: its HTML (already safe) and what it is sorted by."""

    html: str
    sort: Number | str
    number: bool = False


def words(text: object) -> Cell:
    """A cell of plain words."""
    return Cell(escape(str(text)) or UNKNOWN, str(text).lower())


def figures(text: str, value: Number | None) -> Cell:
    """A cell of a number, sorted by its value; unknown ones come last."""
    return Cell(escape(text), float("-inf") if value is None else value, number=True)


def folded(summary: str, inside: str) -> Cell:
    """A cell that opens; `inside` is safe HTML."""
    return Cell(f"<details><summary>{escape(summary)}</summary>{inside}</details>", summary.lower())


def code(text: str) -> str:
    """A command or a name as it is typed."""
    return f"<code>{escape(text)}</code>"


def table(name: str, headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table whose columns sort when their heading is pressed."""
    rows = list(rows)
    numeric = [bool(rows) and rows[0][column].number for column in range(len(headings))]
    head = "".join(
        f'<th scope="col"{_class(is_number)}><button type="button">{escape(heading)}</button></th>'
        for heading, is_number in zip(headings, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    return f'<td{_class(cell.number)} data-sort="{escape(str(cell.sort))}">{cell.html}</td>'


def _class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def pairs(values: Iterable[tuple[str, str]]) -> str:
    """Names and values (safe HTML) below each other."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{value}</dd>' for name, value in values)}</dl>"


def section(name: str, title: str, body: str, lead: str = "") -> str:
    """A section of the page; `lead` is a plain sentence below its heading."""
    intro = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{intro}{body}</section>'


def grid(parts: Iterable[str]) -> str:
    """Charts beside each other, as many as fit."""
    return f'<div class="grid">{"".join(parts)}</div>'
