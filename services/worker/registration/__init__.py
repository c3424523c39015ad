"""Registration of a worker with its router, and what it registers: its address, model and container."""
