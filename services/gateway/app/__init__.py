"""The gateway as a process: its parts, their start and end, the HTTP application, readiness."""
