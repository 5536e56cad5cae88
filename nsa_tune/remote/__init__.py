"""HTTP, and databases that a server keeps: fetched when they are opened, copies kept for later.

An engine runs this when it starts: the standard library only.
"""

from __future__ import annotations
