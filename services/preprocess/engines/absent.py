"""See `services.common.absent`."""

from services.common.absent import stand_in_for_absent

__all__ = ["stand_in_for_absent"]
