"""Writes a small trace with bursts, which `sluice advise --replay` can be tried on: `burst_trace.jsonl`.

Forty minutes: calm, a burst of eight minutes, calm, a ramp of ten minutes. Arrivals are random, lengths as of chats
with long prompts; the same seed gives the same file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

FILE = Path(__file__).with_name("burst_trace.jsonl")
SEED = 1
PHASES: Sequence[tuple[float, float, float]] = (
    (0.0, 0.4, 0.4),
    (480.0, 2.0, 2.0),
    (960.0, 0.4, 0.4),
    (1_800.0, 0.4, 2.5),
)
"""Start in seconds, requests a second at the start and at the end of each phase."""
END_S = 2_400.0


def lines(seed: int = SEED) -> Iterator[str]:
    """Yields the requests as JSON lines, by the time of their arrival."""
    random = Random(seed)
    now_s = 0.0
    while True:
        now_s += random.expovariate(_rate(now_s))
        if now_s >= END_S:
            return
        prompt = min(int(random.lognormvariate(8.7, 0.9)) + 1, 60_000)
        output = min(int(random.lognormvariate(5.6, 0.7)) + 1, 2_000)
        request = {"timestamp": round(1e3 * now_s), "input_length": prompt, "output_length": output}
        yield json.dumps(request) + "\n"


def _rate(now_s: float) -> float:
    start_s, first, last = max(phase for phase in PHASES if phase[0] <= now_s)
    end_s = min((phase[0] for phase in PHASES if phase[0] > now_s), default=END_S)
    return first + (last - first) * (now_s - start_s) / (end_s - start_s)


if __name__ == "__main__":
    FILE.write_text("".join(lines()), "utf-8")
