"""Acceptance criteria of the protocol, run on the servers of a deployment: `holdfast verify --deployment`."""
