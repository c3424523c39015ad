"""`sluice doctor`: checks of a configuration, and their findings."""
