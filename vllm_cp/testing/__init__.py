"""Fakes for your own tests of what you build on vllm-cp: workers on real ports, without a GPU and without vLLM.

    from vllm_cp import ControlClient
    from vllm_cp.testing import FakeWorker

    def test_my_controller_notices_a_dead_engine():
        with FakeWorker(ranks=2) as worker, ControlClient(worker.target) as client:
            worker.die(reported=True)
            ...

``FakeWorker`` is one worker in your process; ``FakeFleet`` is many in a process of their own; ``FakeHttp`` is the HTTP
side of a worker, with fault tolerance. Nothing of vllm-cp
itself imports this package.
"""

from __future__ import annotations

from vllm_cp.testing._controls import Controls
from vllm_cp.testing._fleet import FakeFleet
from vllm_cp.testing._http import FakeGroup, FakeHttp, SeenRequest
from vllm_cp.testing._kv import FakeKvPublisher, HashKind, KvLayout
from vllm_cp.testing._ports import TlsFiles
from vllm_cp.testing._seen import SeenCall
from vllm_cp.testing._server import FakeWorker

__all__ = [
    "Controls",
    "FakeFleet",
    "FakeGroup",
    "FakeHttp",
    "FakeKvPublisher",
    "FakeWorker",
    "HashKind",
    "KvLayout",
    "SeenCall",
    "SeenRequest",
    "TlsFiles",
]
