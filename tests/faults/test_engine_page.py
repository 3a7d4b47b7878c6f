"""The worker's own page: held equal to prometheus_client's parsers, on recorded pages and on invented ones."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from tests.faults.conftest import DATA, Connect
from vllm_cp import errors as e
from vllm_cp.engine_page import parse_page
from vllm_cp.models.probe import EngineMetrics
from vllm_cp.testing._http import FakeHttp

TOKENS = "vllm:generation_tokens_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_CACHE = "vllm:kv_cache_usage_perc"
WEIGHTS = "vllm:rl_weight_update_operations_in_flight"
SLEEP = "vllm:sleep_mode_operations_in_flight"
START = "process_start_time_seconds"
WANTED = (TOKENS, RUNNING, WAITING, KV_CACHE, WEIGHTS, SLEEP, START)

PAGES = {
    "metrics_python_0.32.0.txt": EngineMetrics(
        generation_tokens=62,
        tokens_by_engine=(62,),
        running=0,
        waiting=0,
        kv_cache_usage_ratio=0,
        process_start=1796066261.33,
    ),
    "metrics_rust_0.32.0.txt": EngineMetrics(
        generation_tokens=2050, tokens_by_engine=(2050,), running=0, waiting=0, kv_cache_usage_ratio=0
    ),
    "metrics_rust_dp2_0.32.0.txt": EngineMetrics(
        generation_tokens=8, tokens_by_engine=(4, 4), running=0, waiting=0, kv_cache_usage_ratio=0
    ),
}


def by_library(families: Iterable[Metric]) -> EngineMetrics:
    """The same facts, from a whole parse."""
    found: dict[str, list[float]] = {}
    for family in families:
        for sample in family.samples:
            if sample.name in WANTED and math.isfinite(sample.value):
                found.setdefault(sample.name, []).append(float(sample.value))

    def total(name: str) -> float | None:
        return math.fsum(found[name]) if name in found else None

    return EngineMetrics(
        generation_tokens=total(TOKENS),
        tokens_by_engine=tuple(found.get(TOKENS, ())),
        running=total(RUNNING),
        waiting=total(WAITING),
        maintenance=(total(WEIGHTS) or 0.0) + (total(SLEEP) or 0.0),
        kv_cache_usage_ratio=max(found[KV_CACHE], default=None) if KV_CACHE in found else None,
        process_start=min(found[START], default=None) if START in found else None,
    )


@pytest.mark.parametrize("name", PAGES)
def test_recorded_pages_read_as_the_library_reads_them(name: str) -> None:
    """On pages of both real servers the scanner finds what a whole parse finds."""
    page = (DATA / name).read_bytes()
    library = openmetrics if "rust" in name else prometheus
    assert parse_page(page) == by_library(library(page.decode())) == PAGES[name]


@pytest.mark.parametrize("name", PAGES)
def test_recorded_pages_with_other_numbers(name: str) -> None:
    """The recorded engines were idle: with every sample of the page changed both readings still agree."""
    lines = (DATA / name).read_text().splitlines()
    busy = [
        line if line.startswith("#") or "_bucket" in line or "_created" in line
        else f"{line.rpartition(' ')[0]} {number}.5" if line.startswith(WANTED) else line
        for number, line in enumerate(lines)
    ]  # fmt: skip
    page = "\n".join(busy) + "\n"
    read = parse_page(page.encode())
    assert read == by_library((openmetrics if "rust" in name else prometheus)(page))
    assert read.generation_tokens != PAGES[name].generation_tokens


# What stands in a label value: anything, the characters that matter to a scanner above all.
VALUES = st.text(st.one_of(st.sampled_from('{}"\\\n, =#\t'), st.characters(codec="utf-8")), max_size=12)
NUMBERS = st.one_of(
    st.integers(-(10**12), 10**15).map(str),
    st.floats(allow_nan=False).map(repr),
    st.sampled_from(["NaN", "+Inf", "-Inf", "1e9", "1.5E+3", "0", "-0.0"]),
)
OTHERS = ("vllm:num_requests_waiting_by_reason", "vllm:generation_tokens_seen", "other_process_start_time_seconds")


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@st.composite
def families(draw: st.DrawFn, *, total: str) -> list[tuple[str, str, list[str]]]:
    """Families as (name, kind, lines of samples); ``total`` is what a counter's family lacks of its sample's name."""
    made: list[tuple[str, str, list[str]]] = []
    for sample in draw(st.lists(st.sampled_from([*WANTED, *OTHERS]), unique=True)):
        counter = sample == TOKENS
        name = sample.removesuffix(total) if counter else sample
        engines = draw(st.lists(st.integers(0, 500), unique=True, max_size=3))
        lines = []
        for engine in engines:
            labels = f'model_name="{escaped(draw(VALUES))}",engine="{engine}"'
            number = draw(st.integers(0, 10**15).map(str) if counter else NUMBERS)
            lines.append(f"{sample}{{{labels}}} {number}")
        made.append((name, "counter" if counter else "gauge", lines))
    return made


@given(families(total=""), st.sampled_from(["", " ", "\t"]), st.booleans())
def test_any_prometheus_page_reads_as_the_library_reads_it(
    made: list[tuple[str, str, list[str]]], indent: str, stamped: bool
) -> None:
    """Whatever label values and numbers hold, with indentation and time stamps as the format allows."""
    lines: list[str] = []
    for name, kind, samples in made:
        lines += [f"# HELP {name} Says {name}{{}} 5", f"# TYPE {name} {kind}"]
        lines += [indent + sample + (" 1796066261000" if stamped else "") for sample in samples]
    page = "\n".join(lines) + "\n"
    assert parse_page(page.encode()) == by_library(prometheus(page))


@given(families(total="_total"), st.booleans())
def test_any_openmetrics_page_reads_as_the_library_reads_it(
    made: list[tuple[str, str, list[str]]], exemplars: bool
) -> None:
    """The same for OpenMetrics, whose counters may carry exemplars with braces and numbers of their own."""
    lines: list[str] = []
    for name, kind, samples in made:
        lines += [f"# HELP {name} Says {name} 5", f"# TYPE {name} {kind}"]
        exemplar = ' # {trace_id="}{"} 17.0' if exemplars and kind == "counter" else ""
        lines += [sample + exemplar for sample in samples]
    page = "\n".join([*lines, "# EOF"]) + "\n"
    assert parse_page(page.encode()) == by_library(openmetrics(page))


@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(
    [name.encode() for name in WANTED] + [b"{", b"}", b'"', b"\\", b"\n", b" ", b"5", b"#", b"=", b"_", b"\xff"]
), max_size=40).map(b"".join)))  # fmt: skip
def test_nothing_makes_it_raise(page: bytes) -> None:
    """Garbage reads as an empty page, or as what little of it is a sample."""
    read = parse_page(page)
    assert read.maintenance is not None


@pytest.mark.parametrize(
    ("line", "running"),
    [
        ("vllm:num_requests_running 3", 3),
        ("vllm:num_requests_running{} 3", 3),
        ('vllm:num_requests_running { engine = "0" , } 3', 3),
        ('vllm:num_requests_running{engine="0"}3', 3),
        ('vllm:num_requests_running{a="\\"} 9 #"} 3 1796066261000', 3),
        ("vllm:num_requests_running 3\r", 3),
        ("vllm:num_requests_running 1_000", None),
        ("vllm:num_requests_running", None),
        ("vllm:num_requests_running ", None),
        ("vllm:num_requests_running three", None),
        ('vllm:num_requests_running{engine="0" 3', None),
        ('vllm:num_requests_running{engine="0\n"} 3', None),
        ("x vllm:num_requests_running 3", None),
        ("# vllm:num_requests_running 3", None),
        ("vllm:num_requests_running_total 3", None),
        ('other{a="\\nvllm:num_requests_running 3"} 1', None),
    ],
)
def test_single_lines(line: str, running: float | None) -> None:
    """What is a sample of the name, and what only looks like one."""
    assert parse_page(f"{line}\n".encode()).running == running
    assert parse_page(f"\nother 1\n{line}".encode()).running == running


def test_engines_are_summed_and_their_highest_usage_is_taken() -> None:
    """Counts add up over engines, usage does not; both kinds of maintenance count."""
    page = b"""
vllm:generation_tokens_total{engine="0"} 10
vllm:generation_tokens_total{engine="1"} 5
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:rl_weight_update_operations_in_flight 2
vllm:sleep_mode_operations_in_flight 1
"""
    read = parse_page(page)
    assert read == EngineMetrics(
        generation_tokens=15, tokens_by_engine=(10, 5), maintenance=3, kv_cache_usage_ratio=0.75
    )


@pytest.mark.parametrize(
    "page",
    [
        b"vllm:num_requests_running" * 400_000,
        b"vllm:num_requests_running{" * 400_000,
        b'vllm:num_requests_running{a="' + b'""' * 4_000_000,
        b" " * 10_000_000 + b"vllm:num_requests_running 3",
        b"vllm:num_requests_running{\n" * 400_000,
    ],
    ids=["names", "braces", "quotes", "blanks", "lines"],
)
@pytest.mark.timeout(20)
def test_a_hostile_page_takes_no_longer_than_its_length_allows(page: bytes) -> None:
    """Ten megabytes made to slow a scanner down are read in passing."""
    parse_page(page)


@pytest.mark.parametrize("kind", ["python", "rust"])
async def test_the_page_of_a_worker(connect: Connect, kind: str) -> None:
    """Either kind of server is asked for its page, and its engines are summed."""
    with FakeHttp(kind=kind, engines=[0, 1]) as server:  # type: ignore[arg-type]
        server.set(generation_tokens=100, running=2)
        server.set(engine=1, waiting=5, kv_cache_usage=0.5)
        page = await connect(server.url).read_page()
    assert (page.generation_tokens, page.running, page.waiting, page.kv_cache_usage_ratio) == (200, 4, 5, 0.5)
    assert (page.process_start is None) == (kind == "rust")
    assert "text/plain" in server.calls[0].headers["accept"]


async def test_maintenance_is_seen_while_it_lasts(connect: Connect) -> None:
    """A weight update in flight is on the Rust frontend's page."""
    with FakeHttp(kind="rust") as server:
        client = connect(server.url)
        assert (await client.read_page()).maintenance == 0
        server.set(weight_updates=1, sleep_operations=1)
        assert (await client.read_page()).maintenance == 2


async def test_a_page_of_something_else_is_an_error(connect: Connect) -> None:
    """JSON or HTML under /metrics is nobody's metrics; "nothing known" would hide that."""
    with FakeHttp() as server:
        server.fail("/metrics", 200, {"status": "ok"})
        with pytest.raises(e.EngineFailed, match="no page of metrics"):
            await connect(server.url).read_page()
