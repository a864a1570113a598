"""The protocol's acceptance criteria, run on a deployment's own servers: `holdfast verify --deployment`."""
