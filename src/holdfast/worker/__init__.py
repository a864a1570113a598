"""What runs jobs: fetcher, runner, settler, renewer, and the worker that ties them together."""
