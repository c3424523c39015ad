"""Checks files of audio and videos; an extension, with the packages of the extra `clips`."""
