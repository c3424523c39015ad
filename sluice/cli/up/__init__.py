"""`sluice up`: the plan of processes, their supervision and readiness."""
