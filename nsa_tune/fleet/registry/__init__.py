"""A registry: a folder or a bucket with published tables, their manifests and signatures."""

from __future__ import annotations
