"""The daemon's flags: one command line in, frozen settings out. Nothing is started here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from vllm_cp import Connection, __version__
from vllm_cp.episodes import Rules
from vllm_cp.models.ladder import Expect, Rung
from vllm_cp_exporter import configfile
from vllm_cp_exporter.assemble import Flags, assemble
from vllm_cp_exporter.config import Canary, ExporterConfig, parse_listen
from vllm_cp_exporter.logs import FORMATS, LEVELS
from vllm_cp_exporter.webfile import read_web_file

__all__ = ["ENVIRONMENT", "Settings", "command"]

F = TypeVar("F", bound=Callable[..., Any])

#: Before each flag's name in the environment: VLLM_CP_EXPORTER_TARGET.
ENVIRONMENT = "VLLM_CP_EXPORTER"
#: A day.
_LONGEST_S = 86400.0
_DEFAULTS = ExporterConfig()
_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Settings:
    """What one command line says."""

    exporter: ExporterConfig
    config_file: Path | None = None
    #: Only say whether they are right.
    check: bool = False


def _seconds(_: click.Context, __: click.Parameter, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_S:
        raise click.BadParameter(f"{text!r} is no number of seconds above 0 and up to {_LONGEST_S:.0f}")
    return seconds


def _duration(flag: str, default: float, text: str) -> Callable[[F], F]:
    return click.option(flag, metavar="SECONDS", default=f"{default:g}", callback=_seconds, help=text)


_FILE = click.Path(path_type=Path)


@click.command(
    "vllm-cp-exporter",
    context_settings={
        "auto_envvar_prefix": ENVIRONMENT,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "show_default": True,
    },
    epilog=f"Each flag may stand in the environment too: --probe-interval is {ENVIRONMENT}_PROBE_INTERVAL."
    " Exit codes: 0 stopped as asked, 1 cannot start, 2 a flag is wrong.",
)
@click.option(
    "--config", metavar="FILE", type=_FILE, help="Read this YAML file too; flags win over it. Read again at SIGHUP."
)
@click.option("--check-config", is_flag=True, help="Say whether flags and file are right, and stop: exit code 0 or 2.")
@click.option(
    "--target",
    "targets",
    metavar="[NAME=]HOST:PORT",
    multiple=True,
    envvar=f"{ENVIRONMENT}_TARGET",
    help="Worker to watch; repeatable. NAME is its worker label, else the target as written. Port 8001 if left out."
    " Its HTTP server may follow after a comma: HOST:PORT,http://HOST:PORT.",
)
@click.option("--pool", metavar="NAME", default="default", help="The pool label of these workers.")
@click.option("--min-ready", metavar="N", type=click.IntRange(min=0), help="Workers wanted ready in the pool.")
@click.option("--listen", metavar="HOST:PORT", default=str(_DEFAULTS.listen), help="Where to serve; [::]:PORT is all.")
@click.option(
    "--ready-rung",
    type=click.Choice([rung.value for rung in Rung]),
    default=_RULES.ready_rung.value,
    help="The rung that makes a worker ready.",
)
@click.option(
    "--expect",
    type=click.Choice([state.value for state in Expect]),
    default=_RULES.expect.value,
    help="The state the pool is meant to be in; a suspended worker is ready unless it is serving.",
)
@_duration("--probe-interval", _DEFAULTS.probe_interval_s, "Between two questions to one worker.")
@_duration("--answer-within", _RULES.answer_within_s, "An engine that owes an answer for longer is silent.")
@_duration("--info-interval", _DEFAULTS.info_interval_s, "Between two readings of what a worker says it is.")
@_duration("--timeout", Connection().timeout_s, "Longest wait for most answers.")
@click.option("--tls", is_flag=True, help="Use TLS and trust the CAs that gRPC brings.")
@click.option("--tls-ca", metavar="FILE", type=_FILE, help="Use TLS and trust the CAs in this PEM file only.")
@click.option("--tls-cert", metavar="FILE", type=_FILE, help="Use TLS and show this certificate (PEM).")
@click.option("--tls-key", metavar="FILE", type=_FILE, help="Key of --tls-cert (PEM).")
@click.option("--server-name", metavar="NAME", help="Name in the workers' certificates, if not the one dialled.")
@click.option("--token-file", metavar="FILE", type=_FILE, help="Send the bearer token in this file; over TLS only.")
@click.option("--insecure-token", is_flag=True, help="Send the token over plaintext too, for all to read.")
@click.option(
    "--canary",
    type=click.Choice([mode.value for mode in Canary]),
    is_flag=False,
    flag_value=Canary.ONCE.value,
    default=Canary.OFF.value,
    help="Let a worker that is idle by its own /metrics generate one token, to prove that it can: once per instance,"
    " or always. Needs the worker's HTTP URL.",
)
@click.option(
    "--kv-events",
    is_flag=True,
    help="Follow the workers' KV-cache events, for the kv_ metrics. Needs the extra kv, and reach to the publishers.",
)
@_duration(
    "--engine-recovery-timeout",
    _DEFAULTS.engine_recovery_timeout_s,
    "How long an unhealthy engine waits for an instruction, as vLLM is configured.",
)
@click.option("--state-file", metavar="FILE", type=_FILE, help="Keep open faults and episodes across restarts here.")
@click.option(
    "--web-config-file",
    metavar="FILE",
    type=_FILE,
    help="TLS, passwords and headers of the daemon's own pages, in the exporter-toolkit's format.",
)
@click.option("--enable-reload", is_flag=True, help="Let POST /-/reload do what SIGHUP does.")
@click.option("--log-format", type=click.Choice(FORMATS), default="logfmt", help="Form of the lines on standard error.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="Least important lines to write.")
@click.version_option(__version__, prog_name="vllm-cp-exporter")
def command(**flags: Any) -> Settings:
    """Watch vLLM workers over their gRPC control plane and publish what is found to Prometheus."""
    config, check = flags.pop("config"), flags.pop("check_config")
    context = click.get_current_context()
    given = {
        name
        for name in flags
        if context.get_parameter_source(name) in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    }
    values = flags | {
        "listen": parse_listen(flags["listen"]),
        "ready_rung": Rung(flags["ready_rung"]),
        "expect": Expect(flags["expect"]),
        "canary": Canary(flags["canary"]),
    }
    said = configfile.read(config) if config is not None else None
    exporter = replace(
        assemble(Flags(values, frozenset(given)), said),
        web_config_file=flags["web_config_file"],
        enable_reload=flags["enable_reload"],
    )
    if exporter.web_config_file is not None:
        read_web_file(exporter.web_config_file)
    return Settings(exporter=exporter, config_file=config, check=check)
