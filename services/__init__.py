"""The services of the suite.

gRPC's event engine passes each message between three threads; its older pollers pass it between two, which saves a
third of the CPU time and of the latency of a message (benchmarks/README.md, "Tried and measured"). gRPC reads the
variable when it is imported; a value that is set already is kept.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
