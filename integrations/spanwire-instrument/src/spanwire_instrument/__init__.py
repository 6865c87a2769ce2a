"""Tracing and connection re-use under existing clients of models."""

from __future__ import annotations
