"""Real processes and services that tests start: Redis, suites, routers, workers."""
