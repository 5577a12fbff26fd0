"""Clearhead."""
