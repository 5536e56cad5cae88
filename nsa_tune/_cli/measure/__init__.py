"""The commands that use this machine's device: `run`, `check`, `probe` and `doctor`."""
