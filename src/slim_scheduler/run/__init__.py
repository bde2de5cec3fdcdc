"""Whole runs: one run into its folder, comparisons, and the bound."""
