"""The pipeline of a request: its configuration, its stages, and plugins that replace them."""
