"""Registration of a worker with a router, and the address and id that it registers."""
