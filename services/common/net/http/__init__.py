"""The HTTP/1.1 server of the gateway and of the router: uvicorn within bounds."""
