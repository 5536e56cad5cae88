"""The report as a page that is served, and that stays true while a run goes on.

Needs starlette and uvicorn (the extra `dashboard`), which are imported only here.
"""

from __future__ import annotations
