"""Plain types of a generation that several services share; `services.common.rpc.generation` has their messages."""
