"""Policies that turn the view into a decision."""
