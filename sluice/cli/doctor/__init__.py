"""`sluice doctor`: checks of a running suite."""
