"""Adam's moments of the selected rows: what is stored, how precisely, and what a refresh does to it."""
