"""A database that a server keeps: fetched when it is opened, and kept for when the server is away.

An engine runs this when it starts: the standard library only.
"""

from __future__ import annotations
