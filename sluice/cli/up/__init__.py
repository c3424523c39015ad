"""`sluice up`: plans, supervises and probes the processes of a suite."""
