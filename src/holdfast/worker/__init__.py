"""The worker and its parts: fetcher, runner, settler, renewer."""
