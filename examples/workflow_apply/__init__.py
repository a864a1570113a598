"""Workflows that survive: a web service, a model, MongoDB, and holdfast between them."""
