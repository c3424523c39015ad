"""Starts the postprocess service: `python -m services.postprocess`."""

from services.common.rpc.runner import run
from services.postprocess.service import serve
from services.postprocess.settings import PostprocessSettings


def main() -> None:
    """Runs until SIGTERM or SIGINT."""
    settings = PostprocessSettings.load()
    run("postprocess", settings, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
