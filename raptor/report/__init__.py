"""Figures for papers, and the interactive page."""
