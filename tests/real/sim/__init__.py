"""Simulated vLLM engine cores for a genuine ``vllm-rs`` frontend.

No GPU, torch or vllm package is needed: the package speaks the ZMQ/msgpack protocol between vLLM's frontend and its
engine cores.  The frontend cannot tell the difference, so everything it serves over gRPC and HTTP is the real thing,
while a test sets the facts behind it and breaks the engines as it likes.

| file         | noun                                                              |
|--------------|-------------------------------------------------------------------|
| facts.py     | what an engine reports about itself and how it behaves            |
| protocol.py  | the bytes on the sockets, and the start-up handshake in words     |
| kv.py        | KV-event publisher and the block cache behind it                  |
| scheduler.py | requests, steps and statistics of one engine; no sockets          |
| utilities.py | the calls a frontend makes on an engine (pause, sleep, LoRA, ...) |
| engine.py    | one engine core: joins, receives, steps, sends, fails on command  |
| moments.py   | when something was done to an engine, by two clocks               |
| fleet.py     | all data-parallel ranks of one deployment                         |
| commands.py  | what can be done to a fleet, by name                              |
| control.py   | the same over a JSON-lines port, and the command line             |
| managed.py   | stand-in for the Python that ``vllm-rs serve --python`` launches  |
| model.py     | a model directory without weights                                 |

Left out: logprobs, structured outputs, stop tokens, multimodal inputs, speculative decoding, DP waves, more than one
KV-cache group, preemption.  Weight-transfer calls succeed without doing anything.  KV events differ from a real block
pool in two ways: evictions come as one BlockRemoved after the BlockStored, and AllBlocksCleared is published at once
instead of with the next scheduling step.
"""

from tests.real.sim.facts import EngineFacts, KvEventsFacts
from tests.real.sim.fleet import Fleet
from tests.real.sim.moments import Moment

__all__ = ["EngineFacts", "Fleet", "KvEventsFacts", "Moment"]
