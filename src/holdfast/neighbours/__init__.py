"""Worker processes of the same host: their records, whether they still run, and what happens when one has ended."""
