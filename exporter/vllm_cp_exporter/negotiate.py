"""Which form of the page, and whether compressed: what Accept and Accept-Encoding ask for, weights included.

prometheus_client gives OpenMetrics to whoever mentions it, so this is done here. Nobody is turned away: who accepts
nothing that we have gets the plain text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["OPENMETRICS", "TEXT", "Form", "accepts_gzip", "choose_form"]


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the page."""

    media: str
    version: str

    @property
    def content_type(self) -> str:
        """The header value."""
        return f"{self.media}; version={self.version}; charset=utf-8"


TEXT = Form("text/plain", "0.0.4")
OPENMETRICS = Form("application/openmetrics-text", "1.0.0")

_QUALITY = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")


@dataclass(frozen=True, slots=True)
class _Wish:
    name: str
    parameters: dict[str, str]
    quality: float


def _wishes(header: str) -> list[_Wish]:
    """The entries of such a header. One whose weight makes no sense is left out."""
    found = []
    for entry in header.split(","):
        name, *rest = (part.strip() for part in entry.split(";"))
        parameters = {}
        for part in rest:
            key, _, value = part.partition("=")
            parameters[key.strip().lower()] = value.strip().strip('"')
        quality = parameters.pop("q", "1")
        if name and _QUALITY.fullmatch(quality):
            found.append(_Wish(name.lower(), parameters, float(quality)))
    return found


def choose_form(accept: str) -> Form:
    """The form of the page for an Accept header; "" when there is none."""
    wishes = _wishes(accept)
    text, open_metrics = _rank(TEXT, wishes), _rank(OPENMETRICS, wishes)
    return OPENMETRICS if open_metrics > text and open_metrics[0] > 0 else TEXT


def _rank(form: Form, wishes: list[_Wish]) -> tuple[float, int, int]:
    """How welcome a form is: its weight, then how exactly it was named, then how early."""
    best = (0.0, 0, 0)
    exactness = 0
    for place, wish in enumerate(wishes):
        exact = _exactness(form, wish)
        if exact > exactness:  # the most exact entry speaks for the form, also where its weight is lower
            exactness = exact
            best = (wish.quality, exact, -place)
    return best


def _exactness(form: Form, wish: _Wish) -> int:
    """0: the entry is about something else. Else, higher is more exact."""
    if wish.name == "*/*":
        return 1
    if wish.name == f"{form.media.partition('/')[0]}/*":
        return 2
    if wish.name != form.media or wish.parameters.get("version", form.version) != form.version:
        return 0
    return 4 if "version" in wish.parameters else 3


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether to compress, for an Accept-Encoding header; "" when there is none."""
    weights = {wish.name: wish.quality for wish in _wishes(accept_encoding)}
    gzip = weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0)))
    return gzip > 0 and gzip >= weights.get("identity", 0.0)
