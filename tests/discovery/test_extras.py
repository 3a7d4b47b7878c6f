"""What happens where an optional package is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_cp.discovery import DnsDiscoverer, DnsName, FileDiscoverer, KubernetesDiscoverer


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No optional package can be imported."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("dns", "yaml", "kubernetes_asyncio"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("dns", "yaml", "kubernetes_asyncio"):
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


@pytest.mark.usefixtures("missing")
def test_each_source_names_the_extra_that_brings_its_package() -> None:
    """When it is made, not at its first question; and in words that can be pasted into a shell."""
    with pytest.raises(ImportError, match=r"pip install 'vllm-cp\[discovery\]'"):
        DnsDiscoverer([DnsName(name="w.test", port=1)])
    with pytest.raises(ImportError, match=r"pip install 'vllm-cp\[discovery\]', or write JSON"):
        FileDiscoverer(["targets.yml"])
    with pytest.raises(ImportError, match=r"pip install 'vllm-cp\[kubernetes\]'"):
        KubernetesDiscoverer(namespace="ml")


@pytest.mark.usefixtures("missing")
def test_json_files_need_no_extra(tmp_path: Path) -> None:
    """The base install can read them, broken ones included."""
    (tmp_path / "t.json").write_text('[{"targets": ["a:1"]}]')
    source = FileDiscoverer([tmp_path / "t.json"], poll_s=0.001)
    assert len(source.look().targets) == 1


def test_importing_discovery_imports_no_optional_package() -> None:
    """What isn't used costs nothing."""
    code = (
        "import sys, vllm_cp.discovery, vllm_cp.fleet;"
        "print([m for m in ('dns', 'yaml', 'kubernetes_asyncio', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
