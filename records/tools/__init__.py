"""The programs that start runs and read logs."""
