"""Grass in other libraries' training loops; each module imports its library."""
