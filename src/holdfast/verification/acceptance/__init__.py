"""Acceptance criteria of the protocol, run on a deployment's servers: `holdfast verify --deployment`."""
