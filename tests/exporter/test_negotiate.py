"""What Accept and Accept-Encoding ask for."""

from __future__ import annotations

import pytest

from vllm_cp_exporter.negotiate import OPENMETRICS, TEXT, Form, accepts_gzip, choose_form

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_TEXT_FIRST = "text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        (BROWSER, TEXT),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        (PROMETHEUS_TEXT_FIRST, TEXT),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("APPLICATION/OpenMetrics-Text;Version=1.0.0", OPENMETRICS),
        ('application/openmetrics-text;version="1.0.0"', OPENMETRICS),
        ("application/*", OPENMETRICS),
        ("application/openmetrics-text;q=0.1, text/plain;q=0.9", TEXT),
        ("application/openmetrics-text;q=0.9, text/plain;q=0.1", OPENMETRICS),
        ("text/plain, application/openmetrics-text", TEXT),
        ("application/openmetrics-text, text/plain", OPENMETRICS),
        ("application/openmetrics-text, */*", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0", TEXT),
        ("*/*;q=0.9, application/openmetrics-text;q=0.1", TEXT),
        ("text/*;q=0.2, application/openmetrics-text;q=0.3", OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;version=2.0.0", TEXT),
        ("application/json", TEXT),
        ("application/openmetrics-text;q=lots", TEXT),
        ("application/openmetrics-text;q=1.5", TEXT),
        ("application/openmetrics-text;q=nan, text/plain;q=0.1", TEXT),
        (";;;,,,=;q=", TEXT),
        ("\x00ÿ/;q=1,text", TEXT),
    ],
)
def test_accept(accept: str, form: Form) -> None:
    """The form that is wanted most, the text when nothing of ours is wanted."""
    assert choose_form(accept) is form


@pytest.mark.parametrize(
    ("accept", "gzip"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("x-gzip", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("*, gzip;q=0", False),
        ("identity", False),
        ("identity;q=1, gzip;q=0.5", False),
        ("br", False),
        ("gzip;q=much", False),
    ],
)
def test_accept_encoding(accept: str, gzip: bool) -> None:
    """Compressed for those who say that they take it, and would not rather have it plain."""
    assert accepts_gzip(accept) is gzip
