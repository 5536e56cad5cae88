"""`nsa-tune serve`: tables, jobs and the dashboard over HTTP, for many hosts.

Needs starlette, uvicorn and prometheus_client (the extra `serve`). `tokens` and `state` do not.
"""
