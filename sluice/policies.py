"""The contract for stages of routing policies: filters, scorers and pickers of one's own.

A stage is a class derived from `Filter`, `Scorer` or `Picker`, installed under the entry point group `sluice.policies`
and named in the file of `--policies` of the router (docs/policies.md); `examples/policies` has one of each. It receives
plain data and runs in a process without access to the router.
"""

from services.router.scheduling.policies.contract import Candidate, Filter, Picker, PolicyRequest, PolicyTarget, Scorer

__all__ = [
    "Candidate",
    "Filter",
    "Picker",
    "PolicyRequest",
    "PolicyTarget",
    "Scorer",
]
