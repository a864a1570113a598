"""Everything fails: chaos runs in small, and every call to a store at every point."""
