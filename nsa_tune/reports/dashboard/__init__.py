"""The dashboard: the report as a page on a local web server, live while a run goes on.

Needs starlette and uvicorn (the extra `dashboard`), which only this package imports.
"""
