"""SGLang's own server on the CPU, unmodified but for modules that it imports and this machine lacks.

`python tests/engines/serve_sglang.py --model-path …` takes the flags of `python -m sglang.launch_server`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from services.worker.engines.sglang import import_stubs

import_stubs.install()  # here and in the processes that SGLang spawns, which read this file first
import_stubs.forgo_pinned_memory()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
