"""The commands for many hosts: `serve`, `worker`, `job ...` and `token ...`."""
