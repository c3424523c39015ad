"""Where the router's state lives: in this process's memory, or in Redis shared by all replicas."""
