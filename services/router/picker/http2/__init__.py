"""A small server of gRPC over HTTP/2, for streams of many small messages on few connections; see `server`."""
