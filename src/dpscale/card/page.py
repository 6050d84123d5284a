"""The page of a privacy card, from its values: no scripts, and nothing from elsewhere."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpscale.plan import rounded_up

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.big{font-size:2.2rem;font-weight:600;line-height:1.2;margin:.5rem 0}
table{border-collapse:collapse;width:100%;overflow-wrap:anywhere}
td,th{border-top:1px solid #8884;padding:.35rem .6rem .35rem 0;text-align:left;vertical-align:top}
td:first-child{overflow-wrap:normal}
table.words td:first-child{width:9rem}table.pairs td:first-child{width:50%}
ul{padding-left:1.2rem}li,small,p{overflow-wrap:anywhere}
@media(max-width:30rem){body{margin:1rem auto}.big{font-size:1.7rem}table.words td:first-child{width:6.5rem}}
"""


def page(card: Mapping[str, Any]) -> str:
    """One page, for people."""
    guarantee, attacker = card["guarantee"], card["attacker"]
    parts = [
        "<h1>Privacy card</h1>",
        f"<p class=big>ε = {rounded_up(guarantee['epsilon'])} at δ = {guarantee['delta']:g}</p>",
        f"<p>{_text(attacker['words'])}</p>",
        "<h2>What is promised</h2>", _table("words", ((n, w[:1].upper() + w[1:]) for n, w in card["words"].items())),
        "<h2>What an attacker can find</h2>",
        _numbers(("false alarms: wrongly said to be in", "found, at most"),
                 ((f"{row['false_alarms']:.1%}", f"{row['found_at_most']:.1%}") for row in attacker["trade_off"])),
        "<h2>ε at other δ</h2>", _curve(card["curve"]),
        "<h2>What was composed</h2>",
        _items(card["history"] or ["One run, begun once. No ledger was kept."]), _composed(card["composed"]),
        "<h2>Search</h2>", f"<p>{_text(card['search'])}</p>",
        "<h2>What is not counted</h2>", _items(card["not_counted"]),
        "<h2>Randomness</h2>", f"<p>{_text(card['randomness'])}</p>",
        "<h2>Checks during training</h2>",
        _table("pairs", card["checks"].items()) if card["checks"] else "<p>None were recorded.</p>",
        "<h2>Audit</h2>", _audit(card["audit"]),
        "<h2>Software</h2>", _table("words", card["software"].items()),
        f"<p><small>Schema {card['schema']}. Checksum {card['checksum']}. <code>dpscale verify card.json</code> "
        "computes ε anew.</small></p>",
    ]  # fmt: skip
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'><title>Privacy card</title>"
    head += f"<style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of a selection Rényi DP is all that is known."""
    ways = {"pld": "ε, tight (PLD)", "rdp": "ε, Rényi (RDP)"}
    known = [way for way in ways if all(row[way] is not None for row in rows)]
    shown = ((f"{row['delta']:g}", *(f"{row[way]:.4g}" for way in known)) for row in rows)
    return _numbers(("δ", *(ways[way] for way in known)), shown)


_COMPOSED = {"ledger": "Ledger", "run": "Run", "epsilon": "ε spent by all runs", "total": "of a total of",
             "delta": "at δ", "adjacency": "Adjacency", "how": "How"}  # fmt: skip


def _composed(spent: Mapping[str, Any] | None) -> str:
    return _table("words", ((_COMPOSED.get(name, name), _plain(value)) for name, value in (spent or {}).items()))


_AUDIT = (
    "mode",
    "plan",
    "adjacency",
    "epsilon_claimed",
    "epsilon_lower",
    "delta",
    "confidence",
    "observations",
    "p_value",
    "consistent",
)


def _audit(report: Mapping[str, Any] | None) -> str:
    """Its numbers; the points of its curve are in the JSON."""
    if not report:
        return "<p>None was made.</p>"
    shown = [name for name in _AUDIT if name in report] or [*report]
    return _table("pairs", ((name.replace("_", " "), _plain(report[name])) for name in shown))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(kind: str, rows: Iterable[Sequence[Any]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table class={kind}>{body}</table>" if body else ""


def _numbers(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    return _table("numbers", rows).replace(">", f"><tr>{top}</tr>", 1)


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _text(value: Any) -> str:
    return html.escape(str(value))
