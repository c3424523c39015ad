"""See `services.common.stub_modules`."""

from services.common.stub_modules import stand_in_for_absent

__all__ = ["stand_in_for_absent"]
